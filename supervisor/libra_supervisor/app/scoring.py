"""The reward pool of a configuration, and rewards of its rows without any engine."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import anyio
import msgspec
from anyio import to_thread

from libra.config.data import DataConfig
from libra.config.run import RunConfig
from libra.data.dataset import PromptDataset
from libra.data.task import Task
from libra.errors import ConfigError, DataError, ungrouped
from libra.ids import RunId
from libra.rewards.case import RewardCase
from libra.rewards.coercion import RewardFailed
from libra_supervisor.doctor.devices import cpu_cores
from libra_supervisor.events import ChildEvent
from libra_supervisor.process.kernel import Linux
from libra_supervisor.process.logs import open_log_relay
from libra_supervisor.process.spawn import LinuxSpawner, Spawner, become_subreaper
from libra_supervisor.rewards.pool import RewardPool
from libra_supervisor.rewards.worker import RewardSettings, running_worker
from libra_supervisor.validate.dataset import open_dataset


def reward_pool_of(
    data: DataConfig,
    *,
    run_id: RunId,
    run_dir: Path,
    spawner: Spawner,
    environ: Mapping[str, str],
) -> RewardPool:
    """Make the pool that `data` describes; its workers' sockets and logs lie in `run_dir`."""
    settings = RewardSettings(
        run_id=run_id,
        run_dir=run_dir,
        reward=data.reward,
        reward_args=data.reward_args,
        env=environ,
        cwd=str(Path.cwd()),
        timeout_s=data.reward_timeout_s,
        memory_bytes=data.reward_memory_bytes,
    )
    start = partial(running_worker, spawner=spawner, settings=settings)
    return RewardPool(start, num_workers=data.reward_workers or len(cpu_cores()))


class ScoredRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row's response and what the reward function made of it."""

    prompt_id: str
    prompt_text: str
    response_text: str
    answer: Any
    reward: float | None
    failure: str | None
    """Why there is no reward; None when there is one."""


class ScoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `score` found out."""

    rows: tuple[ScoredRow, ...]
    """In the order of the data."""

    example_token_ids: tuple[int, ...]
    """The first row's prompt as the engines get it."""

    example_tokens: tuple[str, ...]

    @property
    def num_failed(self) -> int:
        return sum(row.reward is None for row in self.rows)


async def score_rows(
    config: RunConfig,
    environ: Mapping[str, str],
    *,
    num_rows: int,
    response_field: str | None,
) -> ScoreReport:
    """Score the first `num_rows` rows in real reward workers.

    The response of a row is its `response_field`; None: its answer. Raises DataError for data that
    cannot be used or a field that is not there, ConfigError for a reward that cannot be loaded and
    ChildError for workers that do not start.
    """
    dataset = await to_thread.run_sync(open_dataset, config, config.data.train_data)
    tasks = [dataset.task(int(row)) for row in dataset.rows[:num_rows]]
    cases = [_case(task, dataset, config.data, response_field) for task in tasks]
    with TemporaryDirectory(prefix="libra-score-") as directory:
        outcomes = await _scored(cases, config.data, Path(directory), environ)
    example = tasks[0].prompt_token_ids
    return ScoreReport(
        rows=tuple(map(_row, cases, outcomes)),
        example_token_ids=example,
        example_tokens=dataset.tokenizer.spelled(example),
    )


def _case(
    task: Task, dataset: PromptDataset, data: DataConfig, response_field: str | None
) -> RewardCase:
    if response_field is None:
        response = task.answer
    elif response_field in task.extras:
        response = task.extras[response_field]
    else:
        present = ", ".join(sorted(task.extras)) or "none"
        raise DataError(
            f"{data.train_data}: {task.prompt_id} has no field {response_field!r} "
            f"(beside prompt and answer it has: {present})"
        )
    text = response if isinstance(response, str) else msgspec.json.encode(response).decode()
    return RewardCase(
        prompt_id=task.prompt_id,
        prompt_text=task.prompt_text,
        response_text=text,
        answer=task.answer,
        extras=task.extras,
        finish_reason="stop",
        num_response_tokens=len(dataset.tokenizer.encode_fragment(text)),
        num_turns=1,
    )


async def _scored(
    cases: list[RewardCase], data: DataConfig, directory: Path, environ: Mapping[str, str]
) -> list[float | RewardFailed]:
    """The outcome of every case, in order."""
    outcomes: list[float | RewardFailed] = [RewardFailed("not scored")] * len(cases)

    async def score(index: int) -> None:
        outcomes[index] = await pool.score(cases[index])

    async with _pool(data, directory, environ) as pool, anyio.create_task_group() as scores:
        for index in range(len(cases)):
            scores.start_soon(score, index)
    return outcomes


def check_reward(data: DataConfig, environ: Mapping[str, str]) -> None:
    """Load the reward in a worker, as a run does: blocks, and takes as long as a worker's start.

    Raises ConfigError for a reward that cannot be loaded, and ChildError for a worker that does not
    start.
    """
    try:
        with ungrouped():
            anyio.run(_try_worker, data, environ, backend_options={"use_uvloop": True})
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("reward") else f"reward: {text}") from error


async def _try_worker(data: DataConfig, environ: Mapping[str, str]) -> None:
    one = msgspec.structs.replace(data, reward_workers=1)
    with TemporaryDirectory(prefix="libra-reward-") as directory:
        async with _pool(one, Path(directory), environ) as pool:
            await pool.wait_ready()


@asynccontextmanager
async def _pool(
    data: DataConfig, directory: Path, environ: Mapping[str, str]
) -> AsyncGenerator[RewardPool]:
    """Reward workers outside a run."""
    run_id = RunId(f"score-{uuid4()}")
    become_subreaper()
    async with open_log_relay(directory, run_id=run_id, env=environ, post=_ignore) as logs:
        spawner = LinuxSpawner(run_id=run_id, logs=logs, kernel=Linux(), cgroups=None)
        pool = reward_pool_of(
            data, run_id=run_id, run_dir=directory, spawner=spawner, environ=environ
        )
        async with anyio.create_task_group() as workers:
            workers.start_soon(pool.run)
            yield pool
            workers.cancel_scope.cancel()


async def _ignore(_event: ChildEvent) -> None:
    """The pool tells what becomes of its workers; nobody else has to know."""


def _row(case: RewardCase, outcome: float | RewardFailed) -> ScoredRow:
    reward, failure = (
        (None, outcome.reason) if isinstance(outcome, RewardFailed) else (outcome, None)
    )
    return ScoredRow(
        prompt_id=case.prompt_id,
        prompt_text=case.prompt_text,
        response_text=case.response_text,
        answer=case.answer,
        reward=reward,
        failure=failure,
    )
