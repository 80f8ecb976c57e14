"""The core's side of a step with hybrid replicas: receive, vote, add, reduce, give back."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from libra import clock
from libra.config.run import RunConfig
from libra.errors import InvariantError
from libra.hybrid.channel import Beat
from libra.hybrid.fault import Ballot, Fault, verdicts, votes
from libra.hybrid.head import Contribution, LaneHead
from libra.hybrid.header import Fence, run_hash
from libra.hybrid.terms import LaneTerms
from libra.ids import ReplicaId
from libra.trainer.exchange import Moment, Outcome, Stepped
from libra.trainer.hybrid_backend import HybridBackend
from libra.trainer.hybrid_shares import Shares
from libra.trainer.layout import lane_of
from libra.trainer.loss import LossSums
from libra.trainer.world import World, sum_over_world
from libra.wire.hybrid import HybridStep, LaneOpened, OpenLanes
from libra.wire.rank import MiniBatch, TrainStep

if TYPE_CHECKING:
    from libra.hybrid.checksum import Floats


_NOBODY: Final = HybridStep(epoch=0)


class CoreExchange:
    """`libra.trainer.exchange.Exchange` of one rank of the core."""

    def __init__(self, config: RunConfig, world: World, backend: HybridBackend, beat: Beat) -> None:
        planner = config.global_resource_planner
        self._timeout_s = planner.elastic_hybrid_contribution_timeout_s
        self._norm_limit = planner.elastic_hybrid_norm_limit
        self._aggregation = config.algorithm.loss_agg_mode
        self._world, self._backend, self._beat = world, backend, beat
        self._head: LaneHead | None = None
        self._replica_size = 0
        self._hybrids = _NOBODY
        self._at = Moment(0, 0, 0)
        self._shares = Shares(self._aggregation, MiniBatch((), 0, 0), (), 0)
        self._outcome = Outcome(0, 1.0, ())
        self._reference = 0.0
        """Square of the newest gradient norm above 0."""

        self._digest: int | None = None
        """Of the weights now; None while nobody wants to know."""

        self._reduced: Floats | None = None
        self.dropped: dict[ReplicaId, str] = {}

    def open(self, command: OpenLanes) -> LaneOpened | None:
        sizes, at = self._world.sizes, self._world.at
        self._replica_size = command.replica_size
        lane = lane_of(sizes, at, replica_size=command.replica_size)
        if lane is None:
            return None
        if self._head is None:
            gradients = self._backend.gradients
            terms = LaneTerms(
                run_hash=run_hash(command.run_id),
                count=gradients.count,
                frame_timeout_s=self._timeout_s,
            )
            self._head = LaneHead(
                terms,
                key=command.key,
                lane=lane,
                layout_hash=gradients.layout_hash,
                host=command.hosts[at.rank] if command.hosts else "",
            )
        unix, tcp = self._head.unix_address, self._head.tcp_address
        return LaneOpened(rank=at.rank, lane=lane, unix=unix, tcp=tcp)

    def begin(self, command: TrainStep) -> None:
        self._hybrids, self.dropped = command.hybrids or _NOBODY, {}
        self._backend.seam.before = self._take_in if command.hybrids else None
        if command.hybrids is None:
            # The weights are going to change without anybody looking.
            self._digest = None
            if self._head is not None:
                self._head.forget_everything()
            return
        if not self._replica_size:
            raise InvariantError(f"step {command.step} has hybrid replicas, but no lane is open")
        if self._head is not None:
            if self._digest is None:
                self._digest = self._backend.gradients.weights_digest()
            self._head.begin(command.step, self._digest, _replicas(command.hybrids))

    def num_own_tokens(self, index: int, mini_batch: MiniBatch) -> int:
        of_members = sum(share.num_tokens[index] for share in self._hybrids.members)
        return mini_batch.global_num_tokens - of_members

    def expect(self, at: Moment, mini_batch: MiniBatch) -> None:
        self._at = at
        self._shares = Shares(self._aggregation, mini_batch, self._hybrids.members, at.mini_batch)
        self._outcome = Outcome(mini_batch.global_num_tokens, 1.0, ())

    def outcome(self) -> Outcome:
        return self._outcome

    def keep_gradients(self) -> None:
        if self._hybrids is _NOBODY:
            return
        gradients = self._backend.gradients
        gradients.gather_shards()
        if self._head is not None:
            self._reduced = self._head.buffer()
            gradients.write(self._reduced)

    def publish(self, stepped: Stepped) -> None:
        if stepped.is_taken and stepped.norm > 0:
            self._reference = stepped.norm**2
        if self._head is None or self._hybrids is _NOBODY:
            return
        if self._reduced is None:
            # The loss was not finite: there is no step, and there are no gradients to speak of.
            self._reduced = self._head.buffer()
            self._reduced[:] = 0.0
        values, self._reduced = self._reduced, None
        self._digest = self._backend.gradients.weights_digest()
        numbers = tuple(map(float, stepped))
        self._head.publish(self._fence(), numbers, values, digest=self._digest)

    def _fence(self) -> Fence:
        at = self._at
        return Fence(at.step, at.mini_batch, self._hybrids.epoch, at.version)

    def _take_in(self) -> bool:
        """Between this rank's own gradients and their reduction: take in what counts.

        Every rank of the core votes once and comes to the same verdicts.
        """
        members = self._present(share.replica_id for share in self._hybrids.members)
        joiners = self._present(self._hybrids.joiners)
        deadline = clock.monotonic() + self._timeout_s
        came = [self._collect(replica_id, deadline) for replica_id in members]
        ballots = [it.ballot for it in came] + [self._standing(it) for it in joiners]
        faults = self._vote(ballots)
        own_sums = [0.0] * len(LossSums._fields)
        for replica_id, contribution, fault in zip(members, came, faults, strict=False):
            if fault is Fault.NONE:
                self._add(replica_id, contribution, own_sums)
        for replica_id, fault in zip([*members, *joiners], faults, strict=True):
            if fault is not Fault.NONE:
                self._drop(replica_id, fault)
        self._renormalise(own_sums)
        return True

    def _present(self, replicas: Iterable[ReplicaId]) -> list[ReplicaId]:
        return [it for it in replicas if it not in self.dropped]

    def _collect(self, replica_id: ReplicaId, deadline: float) -> Contribution:
        if self._head is None:
            return Contribution(Ballot(Fault.NONE), None, ())
        return self._head.collect(replica_id, self._fence(), deadline=deadline, beat=self._beat)

    def _standing(self, replica_id: ReplicaId) -> Ballot:
        return Ballot(Fault.NONE) if self._head is None else self._head.standing(replica_id)

    def _vote(self, ballots: list[Ballot]) -> tuple[Fault, ...]:
        own = self._backend.gradients.square_sum()
        totals = sum_over_world(self._world, votes(ballots, own_square_sum=own))
        one_replica = totals[-1] * self._replica_size / self._world.size
        # A core whose own samples happen to teach nothing judges by the step before.
        reference = max(one_replica, self._reference)
        return verdicts(totals, reference_square_sum=reference, norm_limit=self._norm_limit)

    def _add(self, replica_id: ReplicaId, came: Contribution, sums: list[float]) -> None:
        if self._head is None or came.values is None:
            return
        self._backend.gradients.add(came.values)
        self._head.release(replica_id)
        for index in range(len(sums)):
            sums[index] += came.numbers[index]

    def _drop(self, replica_id: ReplicaId, fault: Fault) -> None:
        detail = ""
        if self._head is not None:
            said = self._head.reason_of(replica_id)
            detail = f" ({said})" if said else ""
            self._head.dismiss(replica_id, fault.words)
        self.dropped[replica_id] = f"{fault.words}{detail}"

    def _renormalise(self, sums: list[float]) -> None:
        num_tokens, scale = self._shares.without(self.dropped)
        if scale != 1.0:
            self._backend.gradients.scale(scale)
        self._outcome = Outcome(num_tokens, scale, sums)


def _replicas(hybrids: HybridStep) -> list[ReplicaId]:
    return [*(share.replica_id for share in hybrids.members), *hybrids.joiners]
