"""A core and its hybrid replicas, each a real gang under torchrun, driven by a test."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import load_file

from libra.config.run import RunConfig
from libra.hybrid.proof import new_key
from libra.ids import PolicyVersion, ReplicaId, RunId
from libra.wire.hybrid import (
    CoreJoined,
    FollowStep,
    HybridStep,
    JoinCore,
    LaneOpened,
    MemberShare,
    OpenLanes,
    StepFollowed,
)
from libra.wire.rank import (
    CheckpointSaved,
    ExportWeights,
    MiniBatch,
    ModelReady,
    RankFailed,
    Sample,
    SaveBegun,
    SaveCheckpoint,
    Shutdown,
    StepTrained,
    TrainStep,
    WeightsExported,
)
from trainer_gang import FakeSupervisor, Program

RUN = RunId("run-under-test")
STEP_WITHIN_S = 120.0
MiniBatches = Sequence[Sequence[Sample]]


class Membership(NamedTuple):
    """Who takes part in a step."""

    members: Sequence[ReplicaId] = ()
    joiners: Sequence[ReplicaId] = ()
    epoch: int = 1


class HybridRun:
    """The core of `num_ranks` and replicas of `replica_size`; every wait has a limit."""

    def __init__(
        self, config: RunConfig, directory: Path, num_ranks: int, *, replica_size: int
    ) -> None:
        self._config, self._directory = config, directory
        self._replica_size = replica_size
        training = config.training
        grid = training.train_tp_size * training.train_pp_size * training.train_cp_size
        self._replica_data = replica_size // grid
        self._stack = ExitStack()
        self._num_ranks = num_ranks
        self.replicas: dict[ReplicaId, FakeSupervisor] = {}
        self.core: FakeSupervisor
        self._key = new_key()

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        self.core = self._stack.enter_context(
            FakeSupervisor(self._config, self._directory / "core", self._num_ranks)
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)

    def start(self, name: str, program: Program | None = None) -> ReplicaId:
        """Start a replica; it becomes ready while other things go on."""
        replica_id, what = ReplicaId(name), program or Program()
        supervisor = FakeSupervisor(
            self._config,
            self._directory / name,
            self._replica_size,
            program=what._replace(arguments=(*what.arguments, "--replica", name)),
        )
        self.replicas[replica_id] = self._stack.enter_context(supervisor)
        return replica_id

    def until_ready(self) -> None:
        for supervisor in (self.core, *self.replicas.values()):
            if not supervisor.links:
                supervisor.accept_all()
                for link in supervisor.links.values():
                    link.expect(ModelReady)

    def open_lanes(self) -> None:
        hosts = ("127.0.0.1",) * self._num_ranks
        command = OpenLanes(RUN, self._key, self._replica_size, hosts)
        self.core.send(command)
        self._lanes: dict[int, LaneOpened] = {}
        for rank, hello in self.core.hellos.items():
            if hello.dp_rank < self._replica_data:
                opened = self.core.links[rank].expect(LaneOpened)
                self._lanes[opened.lane] = opened
        assert sorted(self._lanes) == list(range(self._replica_size))

    def snapshot(self, step: int) -> Path:
        directory = self._directory / "snapshots" / f"step_{step:06d}"
        save = SaveCheckpoint(step=step, directory=str(directory), rollout_state=b"")
        self.core.send(save)
        for link in self.core.links.values():
            link.expect(SaveBegun)
        self.core.links[0].expect(CheckpointSaved)
        return directory

    def join(self, replica_id: ReplicaId, snapshot: Path, *, over_tcp: bool = False) -> int:
        """Returns the step that the replica is at."""
        lanes = [self._lanes[lane] for lane in range(self._replica_size)]
        addresses = tuple(it.tcp if over_tcp and it.tcp else it.unix for it in lanes)
        gang = self.replicas[replica_id]
        gang.send(JoinCore(RUN, replica_id, self._key, addresses, str(snapshot)))
        steps = {link.expect(CoreJoined).step for link in gang.links.values()}
        (step,) = steps
        return step

    def train(
        self,
        step: int,
        batch: MiniBatches,
        *,
        who: Membership | None = None,
        survivors: Sequence[ReplicaId] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> StepTrained:
        """One step; `survivors`: the members that answer at its end, else all.

        `meanwhile` is called while the step goes on.
        """
        taking = who or Membership()
        num_shards = self.num_shards(taking)
        hybrids = None
        if taking != Membership():
            shares = tuple(
                share(name, [cut(batch, index, num_shards) for index in self._shards_of(place)])
                for place, name in enumerate(taking.members)
            )
            hybrids = HybridStep(taking.epoch, shares, tuple(taking.joiners))
        for place, name in enumerate(taking.members):
            gang, own = self.replicas[name], self._shards_of(place)
            for rank, link in gang.links.items():
                shard = cut(batch, own[gang.hellos[rank].dp_rank], num_shards)
                link.send(TrainStep(step, shard, hybrids))
        for rank, link in self.core.links.items():
            shard = cut(batch, self.core.hellos[rank].dp_rank, num_shards)
            link.send(TrainStep(step, shard, hybrids))
        meanwhile()
        for name in taking.members if survivors is None else survivors:
            for link in self.replicas[name].links.values():
                assert link.expect(StepTrained, timeout_s=STEP_WITHIN_S).step == step
        answers = {
            rank: link.expect(StepTrained, timeout_s=STEP_WITHIN_S)
            for rank, link in self.core.links.items()
        }
        return answers[0]

    def num_shards(self, who: Membership) -> int:
        return self.num_core_shards + len(who.members) * self._replica_data

    def _shards_of(self, place: int) -> range:
        """Which shards the member in this place of the membership has, by data-parallel rank."""
        first = self.num_core_shards + place * self._replica_data
        return range(first, first + self._replica_data)

    def follow(self, replica_id: ReplicaId, step: int, *, epoch: int = 1, num: int = 1) -> None:
        """Have a joiner take `step`, which the core has taken with `num` mini-batches."""
        gang = self.replicas[replica_id]
        gang.send(FollowStep(step, tuple(range(num)), epoch))
        for link in gang.links.values():
            assert link.expect(StepFollowed).step == step

    def kill(self, replica_id: ReplicaId) -> None:
        """End a replica at once, whatever it does."""
        self.replicas[replica_id].process.kill()

    def leave(self, replica_id: ReplicaId) -> None:
        gang = self.replicas[replica_id]
        gang.send(Shutdown("it leaves"))
        assert gang.process.wait(timeout=60) == 0

    def failure_of(self, replica_id: ReplicaId) -> RankFailed:
        gang = self.replicas[replica_id]
        return gang.links[0].expect(RankFailed)

    def weights(self, who: FakeSupervisor | None, step: int, name: str) -> dict[str, torch.Tensor]:
        """The whole model's weights, by name; of the core without `who`."""
        gang = who or self.core
        directory = self._directory / name
        gang.send(
            ExportWeights(
                run_id=RUN,
                policy_version=PolicyVersion(step),
                directory=str(directory),
                probe_token_ids=(1, 2),
            )
        )
        gang.links[0].expect(WeightsExported)
        found: dict[str, torch.Tensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            found |= load_file(path)
        return found

    @property
    def num_core_shards(self) -> int:
        return 1 + max(hello.dp_rank for hello in self.core.hellos.values())


def cut(batch: MiniBatches, index: int, num_shards: int) -> tuple[MiniBatch, ...]:
    return tuple(
        MiniBatch(
            samples=tuple(samples[index::num_shards]),
            global_num_tokens=sum(map(num_sampled, samples)),
            global_num_sequences=sum(num_sampled(it) > 0 for it in samples),
        )
        for samples in batch
    )


def share(name: ReplicaId, shards: Sequence[tuple[MiniBatch, ...]]) -> MemberShare:
    """What one member contributes: `shards` of its data-parallel ranks."""
    parts = [
        [sample for mini_batch in mini_batches for sample in mini_batch.samples]
        for mini_batches in zip(*shards, strict=True)
    ]
    return MemberShare(
        replica_id=name,
        num_tokens=tuple(sum(map(num_sampled, part)) for part in parts),
        num_sequences=tuple(sum(num_sampled(it) > 0 for it in part) for part in parts),
    )


def num_sampled(sample: Sample) -> int:
    return sum(sample.loss_mask)


def chosen(batch: MiniBatches, num_shards: int, kept: Sequence[int]) -> list[list[Sample]]:
    """The samples of the shards that came, when the others never did."""
    return [
        [sample for index in kept for sample in samples[index::num_shards]] for samples in batch
    ]


def relative_difference(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest of all tensors' differences, each relative to the tensor's largest value."""
    assert got.keys() == wanted.keys()
    return max(
        float((got[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in wanted
    )


def difference_of_norms(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest of all tensors' differences, norm over norm."""
    assert got.keys() == wanted.keys()
    return max(
        float((got[name].double() - wanted[name].double()).norm() / wanted[name].double().norm())
        for name in wanted
    )


def are_equal(got: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether they are the same to the last bit."""
    assert got.keys() == wanted.keys()
    return all(torch.equal(got[name], wanted[name]) for name in wanted)
