"""What a run needs on disk: the model, its tokenizer, the data."""

from pathlib import Path
from typing import Literal, Protocol

import msgspec

from libra.config.availability import SUPPORTED_ARCHITECTURES
from libra.config.model_arch import ModelArchConfig
from libra.config.model_files import model_arch_of
from libra.config.problems import Problem
from libra.config.run import RunConfig
from libra.config.surface import value_of
from libra.errors import DataError

DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_TLS_FILES = ("node_tls_cert", "node_tls_key", "node_tls_ca")


class Files(Protocol):
    """The file system as the configuration sees it."""

    def read_text(self, path: Path, /) -> str:
        """Text of one file. Raises OSError, or ValueError when it cannot be text."""
        ...

    def directory_of(self, path: Path, /) -> str:
        """Absolute directory of `path`, symbolic links resolved."""
        ...

    def kind_of(self, path: Path, /) -> Literal["file", "directory", "missing"]:
        """Say what is at `path`, symbolic links followed."""
        ...

    def names_in(self, directory: Path, /) -> tuple[str, ...]:
        """Names in `directory`; empty when it cannot be listed."""
        ...


def read_model_arch(
    config: RunConfig, files: Files
) -> tuple[ModelArchConfig | None, tuple[Problem, ...]]:
    """Shape from model_path/config.json; None, with the reasons, where there is no usable one."""
    path = config.model.model_path
    kind = files.kind_of(Path(path))
    if not path:
        hint = "name the model's directory"
        return None, (Problem(path="model_path", what="is not set", hint=hint),)
    if kind != "directory":
        what = f"there is no directory {path}" if kind == "missing" else f"{path} is no directory"
        hint = "point it at a Hugging Face model directory on this machine; nothing is downloaded"
        return None, (Problem(path="model_path", what=what, hint=hint),)
    file = Path(path) / "config.json"
    try:
        return model_arch_of(files.read_text(file)), ()
    except FileNotFoundError:
        what, hint = f"{path} holds no config.json", "it is part of every Hugging Face model"
        return None, (Problem(path="model_path", what=what, hint=hint),)
    except (OSError, ValueError, DataError) as exc:
        return None, (Problem(path="model_path", what=f"cannot use {file}: {exc}"),)


def check_model(config: RunConfig, found: ModelArchConfig, files: Files) -> tuple[Problem, ...]:
    """Problems of a model directory whose config.json says `found`."""
    path = config.model.model_path
    problems: list[Problem] = []
    is_mapped = found.architecture in SUPPORTED_ARCHITECTURES
    if config.training.train_backend == "megatron_core" and not is_mapped:
        what = f"{path} is a {found.architecture}, which megatron_core cannot train"
        supported = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
        hint = f"it trains {supported}; train_backend: fsdp takes others"
        problems.append(Problem(path="model_path", what=what, hint=hint))
    if not any(name.endswith(".safetensors") for name in files.names_in(Path(path))):
        what = f"{path} holds no *.safetensors weights"
        problems.append(Problem(path="model_path", what=what))
    tokenizer = config.model.resolved_tokenizer_path
    key = "tokenizer_path" if config.model.tokenizer_path else "model_path"
    if files.kind_of(Path(tokenizer) / "tokenizer.json") != "file":
        what = f"{tokenizer} holds no tokenizer.json"
        problems.append(Problem(path=key, what=what, hint="set tokenizer_path"))
    return (*problems, *_differences(config, found))


def check_paths(config: RunConfig, files: Files) -> tuple[Problem, ...]:
    """Problems of the paths other than the model's."""
    eval_data = config.data.eval_data
    problems = [
        *_check_data("train_data", config.data.train_data, files),
        *(_check_data("eval_data", eval_data, files) if eval_data else ()),
    ]
    for option in ("api.api_token_file", "node_token_file", *_TLS_FILES):
        path = value_of(config, option)
        if path and files.kind_of(Path(path)) != "file":
            problems.append(Problem(path=option, what=f"there is no file {path}"))
    return tuple(problems)


def _check_data(key: str, path: str, files: Files) -> tuple[Problem, ...]:
    if not path:
        return (Problem(path=key, what="is not set", hint="name the file with the prompts"),)
    match files.kind_of(Path(path)):
        case "missing":
            return (Problem(path=key, what=f"there is no {path}"),)
        case "file" if not path.endswith(DATA_SUFFIXES):
            what = f"{path} is no data set: its suffix is none of {', '.join(DATA_SUFFIXES)}"
            return (Problem(path=key, what=what),)
        case _:
            return ()


def _differences(config: RunConfig, found: ModelArchConfig) -> tuple[Problem, ...]:
    """Where `model_arch` says something else than the model's own config.json."""
    said = config.model_arch
    if said is None:
        return ()
    return tuple(
        Problem(
            path=f"model_arch.{name}",
            what=f"is {getattr(said, name)!r}, but the model's config.json says {value!r}",
            hint="remove model_arch and model_arch_config to use the model's own",
            related=("model_path",),
        )
        for name, value in msgspec.structs.asdict(found).items()
        if getattr(said, name) != value
    )
