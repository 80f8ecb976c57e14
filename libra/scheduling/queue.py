"""Requests that wait for a candidate: bounded, first come first served, each with a deadline.

Only what was asked is kept. Who can serve it is worked out when a candidate appears, so a request
that was queued while there were no instances at all goes to the first one that comes.
"""

import heapq
from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libra.ids import PolicyVersion
    from libra.scheduling.request import Ticket


class WaitingQueue:
    """Tickets grouped by the policy version they need, oldest first within a group."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._group_of: dict[PolicyVersion | None, OrderedDict[int, Ticket]] = {}
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._num_tickets = 0

    def __len__(self) -> int:
        return self._num_tickets

    @property
    def is_full(self) -> bool:
        return self._num_tickets >= self._capacity

    @property
    def next_deadline(self) -> float:
        """No ticket expires before this; inf when none waits."""
        return self._deadlines[0][0] if self._deadlines else inf

    def push(self, ticket: "Ticket") -> None:
        """Append `ticket`; the caller has checked `is_full`."""
        group = self._group_of.setdefault(ticket.request.min_version, OrderedDict())
        group[ticket.serial] = ticket
        self._num_tickets += 1
        heapq.heappush(self._deadlines, (ticket.deadline_at, ticket.serial, ticket))
        if len(self._deadlines) > 2 * self._capacity + 64:
            self._deadlines = [entry for entry in self._deadlines if self._holds(entry[2])]
            heapq.heapify(self._deadlines)

    def remove(self, ticket: "Ticket") -> bool:
        """Take `ticket` out wherever it stands; False when it is not in the queue."""
        group = self._group_of.get(ticket.request.min_version)
        if group is None or group.pop(ticket.serial, None) is None:
            return False
        self._num_tickets -= 1
        if not group:
            del self._group_of[ticket.request.min_version]
        return True

    def oldest_for(self, newest_version: "PolicyVersion") -> "Ticket | None":
        """Find the oldest ticket that candidates at up to `newest_version` can serve."""
        heads = [
            next(iter(group.values()))
            for version, group in self._group_of.items()
            if version is None or version <= newest_version
        ]
        return min(heads, key=_age_order, default=None)

    def pop_expired(self, now: float) -> "Ticket | None":
        """Take out one ticket whose deadline has come; None when there is none."""
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = heapq.heappop(self._deadlines)[2]
            if self.remove(ticket):
                return ticket
        return None

    def pop_any(self) -> "Ticket | None":
        """Take out any one ticket; None when the queue is empty."""
        for group in self._group_of.values():
            ticket = next(iter(group.values()))
            self.remove(ticket)
            return ticket
        return None

    def _holds(self, ticket: "Ticket") -> bool:
        return ticket.serial in self._group_of.get(ticket.request.min_version, ())


def _age_order(ticket: "Ticket") -> int:
    return ticket.serial
