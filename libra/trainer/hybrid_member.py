"""A hybrid replica's side of a step: its gradients go to the core, and the core's steps come back.

Every rank of the replica has a lane of its own and steps its part of the optimizer with the same
numbers as the core, so that no rank of it ever waits for another but in its own model's layers.
"""

from collections.abc import Callable, Sequence

from libra import clock
from libra.config.run import RunConfig
from libra.errors import InvariantError, PeerError
from libra.hybrid.address import LaneHello
from libra.hybrid.header import Fence, run_hash
from libra.hybrid.member import MemberLane
from libra.hybrid.streams import num_streams_for
from libra.trainer.batch import MicroBatch
from libra.trainer.exchange import Stepped
from libra.trainer.hybrid_backend import HybridBackend
from libra.trainer.step import Learner, StepTotals
from libra.trainer.world import World
from libra.wire.hybrid import FollowStep, HybridStep, JoinCore
from libra.wire.rank import TrainMetrics, TrainStep


def _reduce_nothing() -> bool:
    return False


class MemberLearner(Learner):
    """A Learner whose gradients are summed, and whose steps are decided, by the core."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        backend: HybridBackend,
        beat: Callable[[int, str], None],
    ) -> None:
        super().__init__(config, world, backend, beat)
        self._replica = backend
        self._lane: MemberLane | None = None
        self._hybrids: HybridStep | None = None
        self._wait_s = config.supervision.rank_heartbeat_timeout_s
        self._frame_timeout_s = config.global_resource_planner.elastic_hybrid_contribution_timeout_s
        backend.seam.before = _reduce_nothing

    def join(self, command: JoinCore) -> float:
        """Connect to this rank's head with the weights as they are now; returns the seconds."""
        began_at = clock.monotonic()
        gradients = self._replica.gradients
        rank = self._world.at.rank
        self._lane = MemberLane(
            command.lanes[rank],
            key=command.key,
            run_hash=run_hash(command.run_id),
            hello=LaneHello(
                replica_id=command.replica_id,
                lane=rank,
                layout_hash=gradients.layout_hash,
                step=self.progress.step + 1,
                digest=gradients.weights_digest(),
                num_streams=num_streams_for(gradients.count),
            ),
            count=gradients.count,
            timeout_s=self._frame_timeout_s,
        )
        return clock.monotonic() - began_at

    def follow(self, command: FollowStep) -> None:
        """Take a step of the core without having contributed to it."""
        if command.step != self.progress.step + 1:
            raise InvariantError(
                f"asked to follow step {command.step} when {self.progress.step + 1} is next"
            )
        for index in command.mini_batches:
            self._apply(command.step, index, command.epoch)
        self.progress.step = command.step

    def train(self, command: TrainStep) -> TrainMetrics:
        """As the core, but the metrics are those of this replica's own shards."""
        self._hybrids = command.hybrids
        return super().train(command)

    def leave(self) -> None:
        """Close the lane; safe to call when there is none."""
        if self._lane is not None:
            self._lane.close()

    def _train_mini_batch(
        self, batches: Sequence[MicroBatch], command: TrainStep, index: int, totals: StepTotals
    ) -> None:
        lane, epoch = self._open_lane(), self._epoch()
        sums = self._forward_backward(batches)
        fence = Fence(command.step, index, epoch, self.progress.num_optimizer_steps)
        lane.send_gradient(fence, tuple(sums), self._replica.gradients.write)
        stepped = self._apply(command.step, index, epoch)
        totals.grad_norm, totals.learning_rate = stepped.norm, stepped.learning_rate
        totals.num_taken += stepped.is_taken
        totals.num_skipped += not stepped.is_taken
        totals.loss += stepped.loss
        totals.num_tokens += command.mini_batches[index].global_num_tokens

    def _apply(self, step: int, index: int, epoch: int) -> Stepped:
        """Wait for the core's reduced gradients of one mini-batch and step with them."""
        lane = self._open_lane()
        beat = self._beater("wait for core")
        reduced = lane.receive_reduced(timeout_s=self._wait_s, beat=beat)
        wanted = Fence(step, index, epoch, self.progress.num_optimizer_steps)
        if reduced.fence != wanted:
            raise PeerError(f"the core sent {reduced.fence}, due is {wanted}")
        stepped = _stepped(reduced.numbers)
        if stepped.is_taken:
            self._replica.gradients.load(reduced.values)
            self._replica.step_with(stepped.norm, learning_rate=stepped.learning_rate)
        self.progress.num_optimizer_steps = stepped.num_optimizer_steps
        self.progress.num_skipped_in_a_row = stepped.num_skipped_in_a_row
        lane.applied(reduced.fence, self._replica.gradients.weights_digest())
        return stepped

    def _open_lane(self) -> MemberLane:
        if self._lane is None:
            raise InvariantError("a replica is asked to step before it has joined the core")
        return self._lane

    def _epoch(self) -> int:
        if self._hybrids is None:
            raise InvariantError("a replica got a step without a membership")
        return self._hybrids.epoch


def _stepped(numbers: Sequence[float]) -> Stepped:
    norm, rate, is_taken, num_optimizer_steps, num_skipped_in_a_row, loss = numbers
    return Stepped(
        norm, rate, bool(is_taken), int(num_optimizer_steps), int(num_skipped_in_a_row), loss
    )
