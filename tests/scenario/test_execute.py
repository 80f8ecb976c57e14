import json
import os
import threading
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec
import pytest
from structlog.testing import capture_logs

from libra import clock
from libra.config.algorithm import AlgorithmConfig
from libra.errors import PeerError
from libra.ids import PolicyVersion, ReplicaId, RunId
from libra.pools.hybrid import BegunStep
from libra.rollouts.batch import BatchShape
from libra.rollouts.buffer import BufferState
from libra.storage import arrival
from libra.weights.manifest import MANIFEST_NAME
from libra.wire.instance import WeightsReceipt
from libra.wire.rank import ExportWeights, SaveCheckpoint
from libra_supervisor.loop import commands, execute
from libra_supervisor.loop.execute import Executor, Ports, Terms
from libra_supervisor.loop.rollout_state import RolloutState
from libra_supervisor.records.reload import RefusedAck, StrayAck
from libra_supervisor.records.writer import RecordsWriter
from libra_supervisor.run_directory import RunDirectory
from reload_messages import reload_ack, reload_request
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
        self.trained: list[Any] = []
        self.has_been_told = anyio.Event()

    def tell_all(self, attempt, command) -> None:
        self.told.append(command)

    def tell_rank_zero(self, attempt, command) -> None:
        self.told.append(command)

    def train(self, attempt, command, shards) -> None:
        self.told.append(("train", command.step))
        self.trained.append((command, shards))
        self.has_been_told.set()


class RecordedReplicas:
    """What each replica is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def start(self, placement, *, has_devices) -> None:
        self.told.append(("start" if has_devices else "warm", placement.replica_id))

    def stop(self, replica_id, *, in_a_hurry) -> None:
        self.told.append(("end at once" if in_a_hurry else "stop", replica_id))

    def tell(self, replica_id, command) -> None:
        self.told.append((replica_id, command))

    def train(self, replica_id, command, shards) -> None:
        self.told.append((replica_id, command, shards))


def executor_in(  # noqa: PLR0913 - ports
    directory, tasks, *, ranks=None, replicas=None, engines=None, readers=None, post=None
) -> Executor:
    """An executor whose ports are made up as far as a test needs them."""
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
        replicas=replicas or nobody,
        trainer=nobody,
        plans=nobody,
        engines=engines,
        rollouts=nobody,
        evaluations=nobody,
        readers=readers,
        routing=nobody,
        records=RecordsWriter(directory),
        judge=nobody,
        judge_probe=nobody,
    )
    return Executor(terms, ports, tasks=tasks, post=post or nobody, end=nobody)


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


async def test_a_version_is_exported_anew_and_not_forced_to_the_disk(tmp_path):
    ranks, directory = RecordedRanks(), RunDirectory(tmp_path)
    directory.create()
    version = PolicyVersion(3)
    left = directory.weights_of(version)
    left.mkdir()
    async with anyio.create_task_group() as tasks:
        executor_in(directory, tasks, ranks=ranks).execute(commands.PrepareExport(1, version))
    (export,) = ranks.told
    assert isinstance(export, ExportWeights)
    assert (export.directory, export.is_durable) == (str(left), False)
    assert not left.exists()


class Export:
    """A published version and the check of it, as far as the disk shows it yet."""

    def __init__(self, root) -> None:
        self.directory = RunDirectory(root)
        self.directory.create()
        self.path, manifest_hash = publish_weights(self.directory.weights, 3, run_id="r")
        self.files = {path: path.read_bytes() for path in self.path.iterdir()}
        self.check = commands.CheckExport(PolicyVersion(3), str(self.path), manifest_hash)
        self.said: list[Any] = []

    def hide(self, what) -> None:
        weights, manifest = self.path / "model.safetensors", self.path / MANIFEST_NAME
        match what:
            case "weights":
                weights.unlink()
            case "end of the weights":
                weights.write_bytes(self.files[weights][:-1])
            case "everything":
                weights.unlink()
                manifest.unlink()
            case "newest manifest":
                manifest.write_bytes(self.files[manifest] + b" ")

    def show(self) -> None:
        # Whole files at once, as they appear on a shared disk: the check looks all the time.
        for path, content in sorted(self.files.items(), key=lambda it: it[0].name == MANIFEST_NAME):
            if not path.exists() or path.read_bytes() != content:
                # From beside: a half-written file in the directory would be one too many.
                beside = self.path.with_suffix(".shown")
                beside.write_bytes(content)
                beside.replace(path)

    async def post(self, event) -> None:
        self.said.append(event)


HIDDEN = ["weights", "end of the weights", "everything", "newest manifest"]


@pytest.mark.case("R-B79")
@pytest.mark.parametrize("hidden", HIDDEN)
async def test_an_export_that_the_disk_shows_late_is_good_once_it_is_whole(
    tmp_path, monkeypatch, hidden
):
    monkeypatch.setattr(arrival, "LOOK_AGAIN_S", 0.01)
    export = Export(tmp_path)
    export.hide(hidden)
    async with anyio.create_task_group() as tasks:
        executor_in(export.directory, tasks, post=export.post).execute(export.check)
        await clock.sleep(0.3)
        assert export.said == []
        export.show()
    (checked,) = export.said
    assert (checked.version, checked.error) == (3, "")


@pytest.mark.case("R-B79")
@pytest.mark.parametrize("hidden", HIDDEN)
async def test_an_export_that_never_shows_is_an_error_that_says_what_lacks(
    tmp_path, monkeypatch, hidden
):
    monkeypatch.setattr(arrival, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(arrival, "VISIBLE_WITHIN_S", 0.1)
    export = Export(tmp_path)
    export.hide(hidden)
    async with anyio.create_task_group() as tasks:
        executor_in(export.directory, tasks, post=export.post).execute(export.check)
    (checked,) = export.said
    assert str(export.path) in checked.error
    assert checked.receipt_of == {}
    assert "still so after 0.1 s" in checked.error


class RecordedReaders:
    """Node 1 reads, node 2 is away, node 3 does not come to an end."""

    def __init__(self, receipt) -> None:
        self.receipt = receipt
        self.asked: list[object] = []

    async def read_weights(self, node, directory, manifest_hash):
        self.asked.append((node, directory, manifest_hash))
        if node == 2:
            raise PeerError("node 2 is away")
        if node == 3:
            await anyio.sleep_forever()
        return self.receipt


async def test_every_node_reads_an_export_once_and_one_that_cannot_leaves_it_to_its_servers(
    tmp_path, monkeypatch
):
    wall_ns = clock.wall_ns
    monkeypatch.setattr(clock, "wall_ns", lambda: wall_ns() + 10**9)
    export = Export(tmp_path)
    readers = RecordedReaders(WeightsReceipt("another boot", ()))
    async with anyio.create_task_group() as tasks:
        executor = executor_in(export.directory, tasks, post=export.post, readers=readers)
        executor.execute(msgspec.structs.replace(export.check, nodes=(1, 2)))
    (checked,) = export.said
    assert checked.error == ""
    assert sorted(checked.receipt_of) == [0, 1]
    assert checked.receipt_of[1] == readers.receipt
    assert [it.name for it in checked.receipt_of[0].files] == ["model.safetensors"]
    about = (export.check.directory, export.check.manifest_hash)
    assert sorted(readers.asked) == [(1, *about), (2, *about)]


async def test_an_export_that_is_broken_is_said_without_waiting_for_other_nodes(tmp_path):
    export = Export(tmp_path)
    weights = export.path / "model.safetensors"
    weights.write_bytes(export.files[weights][:-1] + b"?")
    readers = RecordedReaders(None)
    async with anyio.create_task_group() as tasks:
        executor = executor_in(export.directory, tasks, post=export.post, readers=readers)
        executor.execute(msgspec.structs.replace(export.check, nodes=(3,)))
    (checked,) = export.said
    assert "hashes to" in checked.error


async def test_an_ack_without_a_batch_has_a_line_of_its_own_in_reloads(tmp_path):
    directory = RunDirectory(tmp_path)
    ack = reload_ack(reload_request(), "vllm-0")
    stray = StrayAck(
        policy_version=7, nonce=ack.nonce, refused_acks=(RefusedAck(ack, "late"),), wall_time_ns=5
    )
    async with anyio.create_task_group() as tasks:
        executor = executor_in(directory, tasks)
        executor.execute(commands.WriteStrayAck(stray))
        await executor.until_written()
    (line,) = directory.reloads.read_text().splitlines()
    written = json.loads(line)
    assert (written["policy_version"], written["nonce"]) == (7, "nonce-1")
    assert written["outcome"] == "no batch"
    assert written["refused_acks"][0]["ack"]["instance_id"] == "vllm-0"
    assert written["refused_acks"][0]["reason"] == "late"


class LoadingEngines:
    """Engines of which one starts from `directories` at this moment."""

    def __init__(self, *directories) -> None:
        self._directories = frozenset(directories)

    def loading_directories(self):
        return self._directories


@pytest.mark.case("R-B82")
@pytest.mark.case("T-B70")
async def test_a_version_that_a_server_holds_or_starts_from_outlives_newer_ones(tmp_path):
    directory = RunDirectory(tmp_path)
    versions = [PolicyVersion(number) for number in range(1, 8)]
    for version in versions:
        publish_weights(directory.weights, version)
    (directory.weights / ".v000008").mkdir()
    engines = LoadingEngines(directory.weights_of(PolicyVersion(4)))
    async with anyio.create_task_group() as tasks:
        executor = executor_in(directory, tasks, engines=engines)
        executor.execute(commands.RetireVersions(frozenset({PolicyVersion(2)})))
        await executor.until_written()
    kept = sorted(path.name for path in directory.weights.iterdir())
    assert kept == [".v000008", "v000002", "v000004", "v000006", "v000007"]


@pytest.mark.case("R-B82")
async def test_the_served_version_is_kept_though_nobody_holds_it_and_others_are_newer(tmp_path):
    """What an attempt that is given up published is newer, and is of no use to anybody."""
    directory = RunDirectory(tmp_path)
    for number in range(1, 6):
        publish_weights(directory.weights, PolicyVersion(number))
    async with anyio.create_task_group() as tasks:
        executor = executor_in(directory, tasks, engines=LoadingEngines())
        executor.execute(commands.RetireVersions(frozenset({PolicyVersion(1)})))
        await executor.until_written()
    kept = sorted(path.name for path in directory.weights.iterdir())
    assert kept == ["v000001", "v000004", "v000005"]


@pytest.mark.parametrize("fails", ["rename", "unlink"])
async def test_a_version_that_cannot_be_deleted_is_said_and_the_run_goes_on(
    tmp_path, monkeypatch, fails
):
    directory = RunDirectory(tmp_path)
    for number in range(1, 5):
        publish_weights(directory.weights, PolicyVersion(number))

    def refuse(*_, **__):
        raise PermissionError(1, "it is held")

    monkeypatch.setattr(os, fails, refuse)
    with capture_logs() as said:
        async with anyio.create_task_group() as tasks:
            executor = executor_in(directory, tasks, engines=LoadingEngines())
            executor.execute(commands.RetireVersions(frozenset({PolicyVersion(4)})))
            await executor.until_written()
    paths = [Path(line["path"]).name for line in said if line["event"] == "directory_not_removed"]
    names = ["v000001", "v000002"]
    assert paths == (names if fails == "rename" else [f".{name}.discarded" for name in names])


async def test_members_get_the_shards_behind_those_of_the_core(tmp_path):
    ranks, replicas, directory = RecordedRanks(), RecordedReplicas(), RunDirectory(tmp_path)
    directory.create()
    first, second = ReplicaId("hybrid-0"), ReplicaId("hybrid-1")
    begun = BegunStep(3, (0,), 7, (first, second), (ReplicaId("hybrid-2"),))
    group = complete(admitted(n_samples=4))
    async with anyio.create_task_group() as tasks:
        executor = executor_in(directory, tasks, ranks=ranks, replicas=replicas)
        executor._shape = BatchShape(dp_size=1, mini_batch_size=4)
        executor.execute(commands.SendBatch(1, 3, (group,), hybrids=begun))
    ((train, core_shards),) = ranks.trained
    told = {replica_id: shards for replica_id, _, shards in replicas.told}
    assert told.keys() == {first, second}
    assert all(command == train for _, command, _ in replicas.told)
    everything = [*core_shards, *told[first], *told[second]]
    ids = [s.trajectory_id for (mini_batch,) in everything for s in mini_batch.samples]
    assert sorted(ids) == sorted(t.trajectory_id for t in group.trajectories)
    assert (train.step, train.hybrids.epoch, train.hybrids.joiners) == (3, 7, ("hybrid-2",))
    for share in train.hybrids.members:
        ((mini_batch,),) = told[share.replica_id]
        tokens = [sum(sample.loss_mask) for sample in mini_batch.samples]
        assert share.num_tokens == (sum(tokens),)
        assert share.num_sequences == (len(tokens),)


async def test_a_batch_is_sent_after_the_snapshot_that_was_asked_for_before_it(tmp_path):
    ranks, directory = RecordedRanks(), RunDirectory(tmp_path)
    directory.create()
    snapshot = directory.hybrid / "step_000002"
    snapshot.mkdir(parents=True)
    async with anyio.create_task_group() as tasks:
        executor = executor_in(directory, tasks, ranks=ranks)
        executor.execute(commands.TakeSnapshot(1, 2, str(snapshot)))
        executor.execute(commands.SendBatch(1, 3, (complete(admitted()),)))
    saving, training = ranks.told
    assert saving == SaveCheckpoint(2, str(snapshot), b"", is_snapshot=True)
    assert training == ("train", 3)
    assert not snapshot.exists()


async def test_a_snapshot_that_nobody_wants_is_deleted(tmp_path):
    directory = RunDirectory(tmp_path)
    snapshot = directory.hybrid / "step_000002"
    unfinished = directory.hybrid / ".step_000002.trainer-1.partial"
    other = directory.hybrid / ".step_000003.trainer-2.partial"
    for it in (snapshot, unfinished, other):
        it.mkdir(parents=True)
    async with anyio.create_task_group() as tasks:
        executor_in(directory, tasks).execute(commands.DropSnapshot(str(snapshot)))
    assert list(directory.hybrid.iterdir()) == [other]
