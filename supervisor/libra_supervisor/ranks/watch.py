"""Which ranks owe an answer, and which have fallen silent while they do. Pure.

A rank that waits for work says nothing, so silence counts only from a command on: until the
answer, heartbeats have to come. Commands that the whole gang carries out are answered by rank 0
alone, and its answer settles them for everybody.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from libra.ids import Rank
from libra.wire.hybrid import CoreJoined, FollowStep, JoinCore, OpenLanes, StepFollowed
from libra.wire.rank import (
    AbortTransfer,
    AcksJudged,
    ExportWeights,
    Heartbeat,
    JudgeAcks,
    OfferWeights,
    RankCommand,
    RankEvent,
    SaveBegun,
    SaveCheckpoint,
    SendWeights,
    Shutdown,
    StepTrained,
    TakeDevice,
    TrainStep,
    WeightsExported,
    WeightsOffered,
    WeightsSent,
)

ANSWER_TO: Final[dict[type[RankCommand], type[RankEvent]]] = {
    TrainStep: StepTrained,
    ExportWeights: WeightsExported,
    OfferWeights: WeightsOffered,
    SendWeights: WeightsSent,
    SaveCheckpoint: SaveBegun,
    JudgeAcks: AcksJudged,
    JoinCore: CoreJoined,
    FollowStep: StepFollowed,
}
UNANSWERED: Final = (AbortTransfer, OpenLanes, TakeDevice, Shutdown)
"""Heads of lanes do answer OpenLanes; the other ranks have nothing to say. Until it is ready a rank
has the time of a start."""

_OWN_ANSWERS: Final = (StepTrained, SaveBegun, CoreJoined, StepFollowed)


class Silence(msgspec.Struct, frozen=True):
    """A rank that owes an answer and has not been heard for `silent_s`."""

    rank: Rank
    silent_s: float
    last_phase: str


class RankWatch:
    """Follows the ranks of one attempt. `now` is in seconds on one clock."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._owed: dict[Rank, list[type[RankEvent]]] = {}
        self._heard_at: dict[Rank, float] = {}
        self._phase: dict[Rank, str] = {}

    def on_sent(self, ranks: Iterable[Rank], command: RankCommand, *, now: float) -> None:
        if isinstance(command, UNANSWERED):
            return
        for rank in ranks:
            owed = self._owed.setdefault(rank, [])
            # The clock of a rank that was idle starts with its command.
            if not owed:
                self._heard_at[rank] = now
            owed.append(ANSWER_TO[type(command)])

    def on_event(self, rank: Rank, event: RankEvent, *, now: float) -> None:
        if isinstance(event, AcksJudged):
            # From a thread beside the main one: whether that one works it does not say.
            self._owed[rank].remove(AcksJudged)
            return
        self._heard_at[rank] = now
        if isinstance(event, Heartbeat):
            self._phase[rank] = f"{event.phase} of step {event.step}"
            return
        settled = [rank] if isinstance(event, _OWN_ANSWERS) else list(self._owed)
        for who in settled:
            self._settle(who, type(event), now=now)

    def silences(self, *, now: float) -> tuple[Silence, ...]:
        """Ranks silent for longer than the timeout, the longest silent first."""
        found = [
            Silence(rank, now - self._heard_at[rank], self._phase.get(rank, "its first phase"))
            for rank, owed in self._owed.items()
            if owed and now - self._heard_at[rank] >= self._timeout_s
        ]
        return tuple(sorted(found, key=lambda silence: -silence.silent_s))

    def next_deadline(self) -> float | None:
        """When the next rank will have been silent for too long; None while nobody owes."""
        heard = [self._heard_at[rank] for rank, owed in self._owed.items() if owed]
        return min(heard) + self._timeout_s if heard else None

    def _settle(self, rank: Rank, answer: type[RankEvent], *, now: float) -> None:
        owed = self._owed.get(rank, [])
        if answer in owed:
            owed.remove(answer)
            self._heard_at[rank] = now
