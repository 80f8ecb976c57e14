"""Names, shapes and whole tensors of a sharded model, as its Hugging Face files have them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from libra.errors import DataError
from libra.storage.safetensors import model_tensors
from libra.trainer.backend import Beat, HfTensor

NAMES_IN_A_MESSAGE = 5


def export_plan(language_model: Any, model_path: Path) -> dict[str, list[HfTensor]]:
    """By parameter, in the model's order: the tensors of the files that it is made of.

    Call it before the model is sharded. Raises DataError unless all parameters together are exactly
    the tensors in `model_path`, by name and shape. Tied parameters are there once.
    """
    plan = {
        name: _in_files(language_model, name, parameter.detach())
        for name, parameter in language_model.named_parameters()
    }
    made = {
        tensor_name: tuple(tensor.shape)
        for tensors in plan.values()
        for tensor_name, tensor in tensors
    }
    found = {tensor.name: tensor.shape for tensor in model_tensors(model_path)}
    tied = set(language_model.all_tied_weights_keys)
    unknown = {n for n in found.keys() - made.keys() - tied if not n.endswith("inv_freq")}
    if difference := sorted(made.keys() - found.keys() | unknown):
        shown = ", ".join(difference[:NAMES_IN_A_MESSAGE])
        raise DataError(
            f"{model_path}: {len(difference)} tensors are in the files or in "
            f"{type(language_model).__name__}, but not in both: {shown}"
        )
    wrong = [f"{n} is {found[n]} instead of {made[n]}" for n in made if found[n] != made[n]]
    if wrong:
        raise DataError(f"{model_path}: {'; '.join(wrong[:NAMES_IN_A_MESSAGE])}")
    return {
        name: [HfTensor(n, tuple(tensor.shape)) for n, tensor in tensors]
        for name, tensors in plan.items()
    }


def whole_tensors(
    language_model: Any,
    plan: Mapping[str, Sequence[HfTensor]],
    *,
    dtype: torch.dtype,
    rank: int,
    beat: Beat,
    to_cpu: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor, in `dtype`, on rank 0; every rank runs it to the end.

    One parameter is whole at a time.
    """
    for name, parameter in language_model.named_parameters():
        beat()
        whole = full(parameter.detach()).to(dtype)
        if rank == 0:
            given = whole.cpu() if to_cpu else whole
            tensor_of = dict(_in_files(language_model, name, given))
            yield from ((t.name, tensor_of[t.name].contiguous()) for t in plan[name])
        del whole


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor; what every rank holds whole is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _in_files(
    language_model: Any, name: str, tensor: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    """Undo what transformers did to a tensor when it loaded it, e.g. stacking the experts."""
    return list(revert_weight_conversion(language_model, {name: tensor}).items())
