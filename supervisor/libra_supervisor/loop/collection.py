"""How long a batch may take to come together, and what follows when it takes longer. Pure."""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from libra.rollouts.buffer import MissingGroup

Due: TypeAlias = Literal["retry", "last"]
MAX_NAMED = 8


class CollectionTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run."""

    timeout_s: float = math.inf
    max_retries: int = 0
    allows_partial: bool = False
    micro_batch_size: int = 1


class Collection:
    """The wait for one batch. Its limit begins anew with each retry."""

    def __init__(self, terms: CollectionTerms) -> None:
        self.terms = terms
        self._since: float | None = None
        self.num_retries = 0

    def begin(self, *, now: float) -> None:
        """The trainer waits for a batch; retries count on where it has waited for it before."""
        self._since = now

    def end(self) -> None:
        """It has one, or does not wait any more."""
        self._since = None
        self.num_retries = 0

    def excuse(self, *, now: float) -> None:
        """Something else holds the trainer or the rollouts up on purpose."""
        if self._since is not None:
            self._since = now

    def due(self, *, now: float) -> Due | None:
        """What is to be done now; a retry is counted by the call that says so."""
        if self._since is None or now - self._since < self.terms.timeout_s:
            return None
        if self.num_retries >= self.terms.max_retries:
            return "last"
        self.num_retries += 1
        self._since = now
        return "retry"


def in_words(
    missing: Sequence[MissingGroup],
    *,
    num_complete: int,
    num_wanted: int,
    now: float,
    held_by: str = "",
) -> str:
    """`3 of 8 groups are complete; waiting for p1/e0/a0 (samples 1, 3, silent for 60 s), ...`.

    `held_by`: what keeps new groups back where none is in progress.
    """
    named = ", ".join(_named(group, now) for group in missing[:MAX_NAMED])
    more = len(missing) - MAX_NAMED
    others = f" and {more} more" if more > 0 else ""
    idle = f"no group is in progress{f', {held_by}' if held_by else ''}"
    waiting = f"waiting for {named}{others}" if missing else idle
    return f"{num_complete} of {num_wanted} groups are complete; {waiting}"


def _named(group: MissingGroup, now: float) -> str:
    samples = ", ".join(map(str, group.samples))
    since = group.silent_since
    how = "none runs" if since is None else f"silent for {now - since:.0f} s"
    return f"{group.group_id} (samples {samples}, {how})"
