import threading
from typing import Any, cast

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from libra import clock
from libra.config.algorithm import AlgorithmConfig
from libra.ids import PolicyVersion, RunId
from libra.rollouts.batch import BatchShape
from libra.rollouts.buffer import BufferState
from libra.wire.rank import SaveCheckpoint
from libra_supervisor.loop import commands, execute
from libra_supervisor.loop.execute import Executor, Ports, Terms
from libra_supervisor.loop.rollout_state import RolloutState
from libra_supervisor.run_directory import RunDirectory
from trajectories import admitted, complete
from weight_dirs import publish_weights

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


def executor_in(directory, tasks, *, ranks=None, post=None) -> Executor:
    nobody = cast("Any", None)
    terms = Terms(
        run_id=RunId("r"),
        directory=directory,
        algorithm=AlgorithmConfig(),
        shape=BatchShape(dp_size=1, mini_batch_size=2),
        keep_last=2,
        probe_token_ids=(1, 2),
    )
    ports = Ports(
        ranks=ranks,
        engines=nobody,
        rollouts=nobody,
        routing=nobody,
        records=nobody,
        judge=nobody,
    )
    return Executor(terms, ports, tasks=tasks, post=post or nobody, end=nobody)


class Posted:
    """What effects say, and a way to wait for it."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.has_one = anyio.Event()

    async def __call__(self, event) -> None:
        self.events.append(event)
        self.has_one.set()


def lagging(tmp_path, how):
    """A published version as a shared file system may show it at first, and what is still to come.

    The manifest is there; the weights are missing, short, or in an unknown state.
    """
    directory = RunDirectory(tmp_path)
    directory.create()
    published, manifest_hash = publish_weights(directory.weights, 3, run_id="r")
    weights = published / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    if how == "short":
        weights.write_bytes(whole[:-1])
    elif how == "empty":
        weights.touch()
    check = commands.CheckExport(PolicyVersion(3), str(published), manifest_hash)
    return directory, check, lambda: weights.write_bytes(whole)


@pytest.mark.case("R-B79")
@pytest.mark.parametrize("how", ["missing", "short", "empty"])
async def test_weights_that_show_later_than_their_manifest_are_waited_for(
    tmp_path, monkeypatch, how
):
    monkeypatch.setattr(execute, "VISIBLE_POLL_S", 0.01)
    directory, check, arrive = lagging(tmp_path, how)
    posted = Posted()
    async with anyio.create_task_group() as tasks:
        executor_in(directory, tasks, post=posted).execute(check)
        await clock.sleep(0.3)
        assert posted.events == [], "nobody may load what is not there yet"
        arrive()
        await posted.has_one.wait()
    (checked,) = posted.events
    assert (checked.version, checked.error) == (3, "")


@pytest.mark.case("R-B79")
@pytest.mark.parametrize("how", ["missing", "short"])
async def test_weights_that_never_show_are_an_error_that_says_what_is_missing(
    tmp_path, monkeypatch, how
):
    monkeypatch.setattr(execute, "VISIBLE_POLL_S", 0.01)
    monkeypatch.setattr(execute, "VISIBLE_WITHIN_S", 0.05)
    directory, check, _ = lagging(tmp_path, how)
    posted = Posted()
    async with anyio.create_task_group() as tasks:
        executor_in(directory, tasks, post=posted).execute(check)
    (checked,) = posted.events
    assert "model.safetensors" in checked.error


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
    state = RolloutState(
        buffer=BufferState(complete=(), pending=(), quarantined=(), dropped={}), cursor=b""
    )
    async with anyio.create_task_group() as tasks:
        executor = executor_in(directory, tasks, ranks=ranks)
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
