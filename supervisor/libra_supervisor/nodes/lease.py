"""How long a follower may act without its leader, by its own clock alone. Pure.

The follower numbers its signs of life. The leader's messages name the newest that has come in, and
the lease counts from the moment when that one was *sent*: however long anything was under way, the
leader heard it later than that. The leader takes the follower for lost only when a lease and a
margin have passed on the leader's clock since the newest sign of life that it confirmed, so by then
the follower has let go, as long as the two clocks run at nearly the same rate.
"""

from collections import deque
from enum import Enum
from typing import Final

import msgspec

from libra.errors import PeerError

RATE_MARGIN: Final = 0.1
"""Two clocks may differ by this part in how fast they run; real ones do by a thousandth of it."""

SETTLE_S: Final = 1.0
"""Beyond the lease: for the follower to notice its end and to kill what it has to."""

BEATS_PER_LEASE: Final = 5
_MOMENTS_PER_LEASE: Final = 1024
"""How finely the follower remembers when it sent its signs of life: a lease may be cut short by
this part. There may be any number of them in one round trip."""


class Standing(Enum):
    """What a follower may do."""

    HELD = "held"
    """Take work, route, run ranks."""

    LET_GO = "let go"
    """Nothing new; its ranks end at once; its servers wait for a leader."""

    OVER = "over"
    """Its servers end too."""


class LeaseTerms(msgspec.Struct, frozen=True, kw_only=True):
    lease_s: float
    orphan_grace_s: float

    @property
    def beat_period_s(self) -> float:
        return self.lease_s / BEATS_PER_LEASE

    @property
    def suspect_after_s(self) -> float:
        """Silence after which the leader says that something is wrong."""
        return self.lease_s / 2

    @property
    def lost_after_s(self) -> float:
        """Silence after which the leader acts as if the follower were gone."""
        return self.lease_s * (1 + RATE_MARGIN) + SETTLE_S


class Lease:
    """The follower's. Made without one: the first confirmed sign of life begins it."""

    def __init__(self, terms: LeaseTerms, *, now: float) -> None:
        self._terms = terms
        self._until = now
        self._was_held = False
        self._num_beats = 0
        self._open: deque[tuple[int, float]] = deque()
        """The first sign of life of each moment, and when it was sent."""

    @property
    def terms(self) -> LeaseTerms:
        return self._terms

    @property
    def until(self) -> float:
        """The lease's end."""
        return self._until

    @property
    def orphaned_at(self) -> float:
        """From when on its servers have nobody to wait for."""
        return self._until + self._terms.orphan_grace_s

    def beat(self, *, now: float) -> int:
        """Number the sign of life that is being sent."""
        self._num_beats += 1
        lease_s = self._terms.lease_s
        if not self._open or now - self._open[-1][1] >= lease_s / _MOMENTS_PER_LEASE:
            self._open.append((self._num_beats, now))
        while now - self._open[0][1] > lease_s:
            # What it confers is over already.
            self._open.popleft()
        return self._num_beats

    def on_heard(self, beat: int) -> None:
        """The leader has heard the sign of life `beat`, which was sent after those of before.

        Raises PeerError for one that was never sent.
        """
        if beat > self._num_beats:
            raise PeerError(f"sign of life {beat} is confirmed, {self._num_beats} were sent")
        while self._open and self._open[0][0] <= beat:
            _, sent_at = self._open.popleft()
            self._until = max(self._until, sent_at + self._terms.lease_s)
            self._was_held = True

    def end(self, *, now: float) -> None:
        """Let go at once. What was sent before confers nothing any more."""
        self._until = min(self._until, now)
        self._open.clear()

    def has_lapsed(self, *, now: float) -> bool:
        """Whether it was held, and its end has passed: what ended with it does not come back."""
        return self._was_held and now >= self._until

    def standing(self, *, now: float) -> Standing:
        if now < self._until:
            return Standing.HELD
        return Standing.LET_GO if now < self.orphaned_at else Standing.OVER
