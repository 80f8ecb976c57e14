"""`libra-supervisor validate` and `schema`, less the reading of arguments."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from libra.config.load import LoadedConfig, Purpose, load_config
from libra.config.problems import ConfigProblemsError, Problem
from libra.config.schema import json_schema
from libra.config.surface import all_options
from libra.errors import ConfigError, DataError, TokenizerError
from libra_supervisor.validate.names import shipped_names
from libra_supervisor.validate.ports import (
    DatasetSummary,
    EstimateMemory,
    EvaluationDataError,
    SummarizeDataset,
)
from libra_supervisor.validate.report import ConfigReport, explain, finding
from libra_supervisor.validate.text import render


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asked for."""

    path: Path
    overrides: tuple[str, ...] = ()
    environ: Mapping[str, str] = {}
    purpose: Purpose = "run"
    as_json: bool = False


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What to print where, and how to exit."""

    exit_code: int
    stdout: str = ""
    stderr: str = ""


def validate(
    request: Request,
    *,
    summarize_dataset: SummarizeDataset | None = None,
    estimate_memory: EstimateMemory | None = None,
) -> Output:
    """Load and explain a configuration. `summarize_dataset` is given for `--data`."""
    try:
        loaded = load_config(
            request.path,
            request.overrides,
            request.environ,
            purpose=request.purpose,
            shipped=shipped_names(),
        )
        dataset = _summarize(loaded, summarize_dataset)
        memory = tuple(estimate_memory(loaded.config)) if estimate_memory else ()
        report = explain(loaded, dataset=dataset, memory=memory)
    except ConfigProblemsError as exc:
        return _refused(exc, as_json=request.as_json)
    return Output(exit_code=0, stdout=_json(report) if request.as_json else render(report))


def schema() -> Output:
    """JSON Schema of a configuration file."""
    return Output(exit_code=0, stdout=json.dumps(json_schema(), indent=2, allow_nan=False) + "\n")


def _summarize(
    loaded: LoadedConfig, summarize_dataset: SummarizeDataset | None
) -> DatasetSummary | None:
    if summarize_dataset is None:
        return None
    try:
        return summarize_dataset(loaded.config)
    except (ConfigError, DataError) as exc:
        path, what = _place_of(exc, loaded)
        problem = Problem(path=path, what=what, place=loaded.place_of.get(path))
        raise ConfigProblemsError([problem], subject=loaded.sources[0]) from exc


def _place_of(error: ConfigError | DataError, loaded: LoadedConfig) -> tuple[str, str]:
    """The option that names what is broken, and what is wrong with it."""
    if isinstance(error, DataError):
        return _data_option(error, loaded), str(error)
    option, _, what = str(error).partition(": ")
    return (option, what) if option in all_options() else ("workflow", str(error))


def _data_option(error: DataError, loaded: LoadedConfig) -> str:
    if isinstance(error, EvaluationDataError):
        return "eval_data"
    if not isinstance(error, TokenizerError):
        return "train_data"
    return "tokenizer_path" if loaded.config.model.tokenizer_path else "model_path"


def _refused(error: ConfigProblemsError, *, as_json: bool) -> Output:
    if not as_json:
        return Output(exit_code=error.exit_code, stderr=f"{error}\n")
    found: dict[str, Any] = {
        "ok": False,
        "problems": [msgspec.to_builtins(finding(problem)) for problem in error.problems],
    }
    return Output(exit_code=error.exit_code, stdout=_dump(found))


def _json(report: ConfigReport) -> str:
    return _dump({"ok": True, **msgspec.to_builtins(report)})


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"
