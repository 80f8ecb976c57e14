"""Everything `validate` has to say, as one value that both renderings share."""

from collections.abc import Iterator, Sequence
from math import isinf
from typing import Any

import msgspec

from libra.config.arithmetic import (
    BatchEquation,
    batch_equation,
    planner_decides,
    rollout_buckets,
    staleness,
    steps_per_epoch,
)
from libra.config.load import LoadedConfig
from libra.config.problems import Problem
from libra.config.run import RunConfig
from libra.config.surface import all_options, value_of
from libra.data.cursor import visits_of_epochs
from libra_supervisor.validate.ports import DatasetSummary, RoleMemory


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A problem or warning."""

    path: str
    what: str
    hint: str
    where: str
    """`file:line`, an override or an environment variable; empty for a default."""


class OptionReport(msgspec.Struct, frozen=True, kw_only=True):
    """One resolved value. `.inf` is text here, as strict JSON has no infinity."""

    value: Any
    origin: str


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of each side; `data_parallel_size` is None where the planner decides."""

    train_gpus: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    context_parallel_size: int
    expert_parallel_size: int
    data_parallel_size: int | None
    rollout_instances: dict[str, int]
    """Instances by `TP n`."""


class ConfigReport(msgspec.Struct, frozen=True, kw_only=True):
    """A valid configuration, explained."""

    sources: tuple[str, ...]
    batch: BatchEquation
    layout: Layout
    max_policy_versions_in_flight: int | None
    """None: unbounded."""

    max_trajectories_in_flight: int
    steps_per_epoch: float | None
    """None without the data."""

    total_steps: int | None
    """Training steps until the run stops; None when only the data or the clock tells."""

    dataset: DatasetSummary | None
    memory: tuple[RoleMemory, ...]
    warnings: tuple[Finding, ...]
    options: dict[str, OptionReport]


def finding(problem: Problem) -> Finding:
    """Flatten a problem for the renderings."""
    where = str(problem.place) if problem.place else ""
    return Finding(path=problem.path, what=problem.what, hint=problem.hint, where=where)


def explain(
    loaded: LoadedConfig, *, dataset: DatasetSummary | None, memory: Sequence[RoleMemory]
) -> ConfigReport:
    """Say what `loaded` amounts to."""
    config = loaded.config
    bounds = staleness(config)
    epoch = steps_per_epoch(config, rows=dataset.rows) if dataset else None
    versions = bounds.max_policy_versions
    return ConfigReport(
        sources=loaded.sources,
        batch=batch_equation(config),
        layout=_layout(config),
        max_policy_versions_in_flight=None if isinf(versions) else int(versions),
        max_trajectories_in_flight=bounds.max_trajectories,
        steps_per_epoch=epoch,
        total_steps=_total_steps(config, dataset.rows if dataset else None),
        dataset=dataset,
        memory=tuple(memory),
        warnings=tuple(
            finding(problem) for problem in (*loaded.warnings, *_of_dataset(config, dataset))
        ),
        options={
            path: OptionReport(value=_strict(value_of(config, path)), origin=loaded.origin_of(path))
            for path in all_options()
            if _is_there(config, path)
        },
    )


def _of_dataset(config: RunConfig, dataset: DatasetSummary | None) -> Iterator[Problem]:
    if dataset is None:
        return
    prompts = config.training.batch_size // config.algorithm.n_samples
    if dataset.rows < prompts:
        yield Problem(
            path="train_data",
            what=f"{dataset.rows} rows are fewer than the {prompts} prompts of one step: a step "
            "takes prompts from several epochs",
        )
    for number, what in (
        (dataset.skipped_rows, "rows are left out (on_bad_row: skip)"),
        (dataset.over_long_prompts, "over-long prompts are left out (on_long_prompt: skip)"),
    ):
        if number:
            yield Problem(path="train_data", what=f"{number} {what}")


def _layout(config: RunConfig) -> Layout:
    training = config.training
    instances = () if planner_decides(config) else rollout_buckets(config)
    return Layout(
        train_gpus=training.train_gpus,
        tensor_parallel_size=training.train_tp_size,
        pipeline_parallel_size=training.train_pp_size,
        context_parallel_size=training.train_cp_size,
        expert_parallel_size=training.train_ep_size,
        data_parallel_size=batch_equation(config).data_parallel_size,
        rollout_instances={f"TP {bucket.tp}": bucket.count for bucket in instances},
    )


def _total_steps(config: RunConfig, rows: int | None) -> int | None:
    limits = [config.control.total_steps]
    if config.control.epochs is not None and rows is not None:
        prompts = config.training.batch_size // config.algorithm.n_samples
        visits = visits_of_epochs(
            num_prompts=rows, epochs=config.control.epochs, prompts_per_step=prompts
        )
        limits.append(visits // prompts)
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _is_there(config: RunConfig, path: str) -> bool:
    section = path.partition(".")[0]
    return section not in {"hardware", "model_arch"} or getattr(config, section) is not None


def _strict(value: Any) -> Any:
    """Builtins that strict JSON can hold."""
    match value:
        case float() if isinf(value):
            return ".inf" if value > 0 else "-.inf"
        case list() | tuple():
            return [_strict(item) for item in value]
        case dict():
            return {str(key): _strict(item) for key, item in value.items()}
        case msgspec.Struct():
            return _strict(msgspec.to_builtins(value))
        case _:
            return value
