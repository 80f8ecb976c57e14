import threading
from typing import Any, cast

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from libra.config.algorithm import AlgorithmConfig
from libra.ids import RunId
from libra.rollouts.batch import BatchShape
from libra.rollouts.buffer import BufferState
from libra.wire.rank import SaveCheckpoint
from libra_supervisor.loop import commands, execute
from libra_supervisor.loop.execute import Executor, Ports, Terms
from libra_supervisor.loop.rollout_state import RolloutState
from libra_supervisor.run_directory import RunDirectory
from trajectories import admitted, complete

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


class RecordedRanks:
    """What the ranks are told, in order."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.has_been_told = anyio.Event()

    def tell_all(self, attempt, command) -> None:
        self.told.append(command)

    def tell_rank_zero(self, attempt, command) -> None:
        self.told.append(command)

    def train(self, attempt, step, shards) -> None:
        self.told.append(("train", step))
        self.has_been_told.set()


async def test_a_batch_is_sent_after_the_checkpoint_that_was_asked_for_before_it(
    tmp_path, monkeypatch
):
    encoding_may_end, batch_is_cut = threading.Event(), anyio.Event()
    encoded, cut_batch = execute.encoded, execute.cut_batch

    def slowly_encoded(state: RolloutState) -> bytes:
        encoding_may_end.wait()
        return encoded(state)

    def noted_cut(*arguments: Any) -> Any:
        anyio.from_thread.run_sync(batch_is_cut.set)
        return cut_batch(*arguments)

    monkeypatch.setattr(execute, "encoded", slowly_encoded)
    monkeypatch.setattr(execute, "cut_batch", noted_cut)
    ranks, directory = RecordedRanks(), RunDirectory(tmp_path)
    directory.create()
    terms = Terms(
        run_id=RunId("r"),
        directory=directory,
        algorithm=AlgorithmConfig(),
        shape=BatchShape(dp_size=1, mini_batch_size=2),
        keep_last=2,
        probe_token_ids=(1, 2),
    )
    nobody = cast("Any", None)
    ports = Ports(
        ranks=ranks,
        engines=nobody,
        rollouts=nobody,
        evaluations=nobody,
        routing=nobody,
        records=nobody,
        judge=nobody,
        judge_probe=nobody,
    )
    state = RolloutState(
        buffer=BufferState(complete=(), pending=(), quarantined=(), dropped={}), cursor=b""
    )
    async with anyio.create_task_group() as tasks:
        executor = Executor(terms, ports, tasks=tasks, post=nobody, end=nobody)
        executor.execute(commands.SaveRun(1, 2, state))
        executor.execute(commands.SendBatch(1, 3, (complete(admitted()),)))
        await batch_is_cut.wait()
        for _ in range(20):
            # As long as another thread takes to be started and heard of.
            await anyio.to_thread.run_sync(bool)
        told_meanwhile = list(ranks.told)
        encoding_may_end.set()
        await ranks.has_been_told.wait()
    assert told_meanwhile == []
    saved, trained = ranks.told
    assert isinstance(saved, SaveCheckpoint)
    assert saved.directory == str(directory.checkpoint_of(2))
    assert trained == ("train", 3)
