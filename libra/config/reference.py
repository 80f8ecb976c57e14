"""The option reference, docs/configuration.md, from the structs."""

import re
import sys

import msgspec
from msgspec import inspect

from libra.config.compose import COMPOSITION_DOCS
from libra.config.resume import reason_fixed
from libra.config.surface import FLAT_SECTIONS, Option, all_options, section_types, struct_of
from libra.config.wording import field_docs, type_words, value_words


def markdown() -> str:
    """Text of docs/configuration.md."""
    types = section_types()
    flat = [_section(types[name].cls, prefix="", level=2) for name in FLAT_SECTIONS]
    nested = [
        _section(kind.cls, prefix=f"{name}.", level=2)
        for name, kind in types.items()
        if name not in FLAT_SECTIONS
    ]
    return "\n".join([_PREFACE, *flat, _composition(), *nested])


def _section(cls: type[msgspec.Struct], *, prefix: str, level: int) -> str:
    module = sys.modules[cls.__module__].__doc__ or ""
    lines = [f"{'#' * level} {_title(cls, prefix)}", "", " ".join(module.split()), ""]
    lines += ["| Option | Type | Default | Meaning | `--resume` |", "|---|---|---|---|---|"]
    inner: list[str] = []
    kind = inspect.type_info(cls)
    for field in struct_of(kind).fields:
        if isinstance(field.type, inspect.StructType):
            inner.append(_section(field.type.cls, prefix=f"{prefix}{field.name}.", level=level + 1))
        else:
            lines.append(_row(all_options()[f"{prefix}{field.name}"]))
    return "\n".join([*lines, "", *inner])


def _title(cls: type[msgspec.Struct], prefix: str) -> str:
    if prefix:
        return f"`{prefix.rstrip('.')}`"
    words = re.sub(r"(?<!^)([A-Z])", r" \1", cls.__name__.removesuffix("Config"))
    return words.capitalize()


def _row(option: Option) -> str:
    reason = reason_fixed(option.path)
    cells = [
        f"`{option.path}`",
        type_words(option.field.type),
        value_words(option.default),
        field_docs(option.owner)[option.name],
        f"fixed: {reason}" if reason else "may change",
    ]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _composition() -> str:
    lines = ["## Composition", "", "| Key | Meaning |", "|---|---|"]
    lines += [f"| `{key}` | {text} |" for key, text in COMPOSITION_DOCS.items()]
    return "\n".join([*lines, ""])


_PREFACE = """# Configuration

Generated from the structs in `libra/config` by `scripts/generate_docs.py`: edit the docstrings
there, not this page. `libra-supervisor validate CONFIG` shows what a file amounts to, with the
origin of every value; with `--data` it reads the data and the tokenizer too, and with `--for plan`
it takes the file as `plan` and `simulate` do, which need neither the model nor the data.
`libra-supervisor schema` prints a JSON Schema for editors.

## How a configuration is read

A run is one YAML file. It may build on others, and the command line has the last word:

```yaml
base_config: quickstart.yaml
train_data: ../data/other.jsonl
learning_rate: 1e-6
heterogeneous_rollout:
  scheduling:
    load_metric: tokens
```

1. Defaults, then `base_config` files, then the file itself, then environment variables, then
   `-o KEY=VALUE` in the order given, e.g. `-o heterogeneous_rollout.scheduling.load_metric=tokens`.
   VALUE is YAML; a part of KEY that is all digits is a number.
2. Mappings merge key by key and the nearer value wins. An empty mapping `{}` clears what is below
   it; lists are replaced as a whole.
3. Relative paths are relative to the file that says them; in an override or an environment variable
   to the working directory. `~/` is HOME. This holds for file references and for every option of
   type *path*.
4. Most options are top-level keys. Those of the planner and the elastic runtime are under
   `global_resource_planner`, those of routing under `heterogeneous_rollout.scheduling`; at top
   level they are errors that name the right place.
5. YAML is read strictly: no tags, no code, no duplicate keys, text is not taken for a number. The
   one exception is an unquoted `1e-6`, which YAML 1.1 reads as text, where a number is wanted.
   `.inf` stands for no bound where the table allows it.
6. All problems are reported at once, each with its dotted path, file and line, and the nearest
   valid values. The exit code is then 2 and nothing has been started. A value whose effect is not
   built yet, or that the installed packages cannot provide, is refused with the reason.
7. `batch_size`, `mini_batch_size`, `micro_batch_size`, `max_concurrent_rollouts` count *samples*
   (trajectories); the prompts of a step are `batch_size / n_samples`.

Environment variables: `RL_TRAIN_PHASE_TRACE` (1 or 0) sets `phase_trace_enabled`,
`RL_TRAIN_PHASE_TRACE_DIR` sets `phase_trace_dir`. `XDG_DATA_HOME` moves the default of
`global_resource_planner.calibration_dir`. `LIBRA_NODE_TOKEN` hands on the secret of several nodes.
Slurm's and torchrun's tell which part of the job this process is.

The last column says what `--resume` does with a changed value: *may change* takes effect from the
step at which the run goes on; *fixed* is an error.
"""
