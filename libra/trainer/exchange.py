"""How a training step meets hybrid replicas, seen from the step; `Alone` has none."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from libra.errors import ConfigError
from libra.ids import ReplicaId
from libra.wire.hybrid import LaneOpened, OpenLanes
from libra.wire.rank import MiniBatch, TrainStep


class Moment(msgspec.Struct, frozen=True):
    """A mini-batch of the step that is going on."""

    step: int
    mini_batch: int
    version: int
    """Optimizer steps taken before it."""


class Outcome(NamedTuple):
    """What a mini-batch's gradients are of."""

    num_tokens: int
    """Sampled tokens that contributed, of the core and of members."""

    scale: float
    """What was multiplied into the gradients because of those that did not contribute."""

    sums: Sequence[float]
    """Members' part of the loss sums that belong to this rank."""


class Stepped(NamedTuple):
    """What became of a mini-batch."""

    norm: float
    learning_rate: float
    is_taken: bool
    num_optimizer_steps: int
    """Taken since the run began, this one too."""

    num_skipped_in_a_row: int
    loss: float


class Exchange(Protocol):
    """Every rank of the core makes the same calls in the same order."""

    dropped: dict[ReplicaId, str]
    """Replicas that fell out of the step that is going on, and why."""

    def open(self, command: OpenLanes) -> LaneOpened | None:
        """Listen for members where this rank is a head. Raises ConfigError where that cannot be."""

    def begin(self, command: TrainStep) -> None:
        """The next mini-batches are those of `command`."""

    def num_own_tokens(self, index: int, mini_batch: MiniBatch) -> int:
        """Sampled tokens of the core's own shards of mini-batch `index`."""

    def expect(self, at: Moment, mini_batch: MiniBatch) -> None:
        """The next backward passes are those of `at`."""

    def outcome(self) -> Outcome:
        """Of the mini-batch whose gradients were just reduced."""

    def keep_gradients(self) -> None:
        """Take the reduced gradients, which the step is about to clip."""

    def publish(self, stepped: Stepped) -> None:
        """Hand out what was kept."""


class Alone:
    """The core that no replica can join."""

    def __init__(self) -> None:
        self.dropped: dict[ReplicaId, str] = {}
        self._num_tokens = 0

    def open(self, command: OpenLanes) -> LaneOpened | None:
        raise ConfigError(
            f"hybrid replicas of {command.replica_size} ranks need train_backend megatron_core"
        )

    def begin(self, command: TrainStep) -> None:
        pass

    def num_own_tokens(self, index: int, mini_batch: MiniBatch) -> int:
        del index
        return mini_batch.global_num_tokens

    def expect(self, at: Moment, mini_batch: MiniBatch) -> None:
        del at
        self._num_tokens = mini_batch.global_num_tokens

    def outcome(self) -> Outcome:
        return Outcome(self._num_tokens, 1.0, ())

    def keep_gradients(self) -> None:
        pass

    def publish(self, stepped: Stepped) -> None:
        pass
