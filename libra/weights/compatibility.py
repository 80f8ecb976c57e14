"""Whether published tensors can replace those that a server has loaded. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from libra.weights.manifest import TensorEntry

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
HEAD_NAME = "lm_head.weight"

# Derived from the configuration; loaders skip it and some exporters leave it out.
DERIVED_SUFFIX = "rotary_emb.inv_freq"


def incompatibilities(
    loaded: Sequence[TensorEntry],
    offered: Sequence[TensorEntry],
    *,
    tied_embeddings: bool,
    may_cast: bool,
) -> tuple[str, ...]:
    """Reasons in words, empty when `offered` replaces `loaded` tensor by tensor.

    Names and shapes must be equal; with tied embeddings the head may be there or not. Dtypes
    must be equal too, or with `may_cast` change in one way for all tensors of a dtype: a base
    model in BF16 may be trained and published in F32, but a single tensor may not be the odd one.
    """
    old = {entry.name: entry for entry in loaded if _counts(entry, tied_embeddings)}
    new = {entry.name: entry for entry in offered if _counts(entry, tied_embeddings)}
    return (
        *(f"{name} is missing" for name in sorted(old.keys() - new.keys())),
        *(f"{name} is not in the model" for name in sorted(new.keys() - old.keys())),
        *_shape_problems(old, new),
        *_dtype_problems(old, new, may_cast=may_cast),
    )


def _counts(entry: TensorEntry, tied_embeddings: bool) -> bool:
    is_optional_head = tied_embeddings and entry.name == HEAD_NAME
    return not is_optional_head and not entry.name.endswith(DERIVED_SUFFIX)


def _shape_problems(old: dict[str, TensorEntry], new: dict[str, TensorEntry]) -> Iterator[str]:
    for name in sorted(old.keys() & new.keys()):
        if old[name].shape != new[name].shape:
            yield f"{name} has shape {list(new[name].shape)} instead of {list(old[name].shape)}"


def _dtype_problems(
    old: dict[str, TensorEntry], new: dict[str, TensorEntry], *, may_cast: bool
) -> Iterator[str]:
    became: defaultdict[str, set[str]] = defaultdict(set)
    for name in old.keys() & new.keys():
        became[old[name].dtype].add(new[name].dtype)
    for before, after in sorted(became.items()):
        is_cast = may_cast and len(after) == 1 and {before, *after} <= FLOAT_DTYPES
        if after != {before} and not is_cast:
            yield f"tensors of dtype {before} became {' and '.join(sorted(after))}"
