"""Candidates in order of preference, kept incrementally.

A heap with lazy invalidation: a change of load pushes a new entry and bumps the slot's stamp, so
older entries are known to be void. Filing and picking cost O(log n) in C whatever the fleet's size.
"""

import heapq
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, TypeAlias

from libra.ids import InstanceId, PolicyVersion

if TYPE_CHECKING:
    from libra.scheduling.slot import Slot

Entry: TypeAlias = "tuple[bool, float, float, int, int, Slot]"
"""Least preferred, load, turn, slot index, stamp, slot; index and stamp decide before the slot."""

SLACK_ENTRIES = 64


class LoadOrder:
    """The candidates at one policy version."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._num_slots = 0
        self.turn = 0.0
        """Virtual time: the turn of the last pick. Whoever enters late starts here, not at 0."""

    def __len__(self) -> int:
        return self._num_slots

    def enter(self, slot: "Slot") -> None:
        self._num_slots += 1
        slot.turn = max(slot.turn, self.turn)
        self.file(slot)

    def leave(self, slot: "Slot") -> None:
        self._num_slots -= 1
        slot.stamp += 1

    def file(self, slot: "Slot") -> None:
        """(Re-)insert a slot whose load or turn changed."""
        slot.stamp = stamp = slot.stamp + 1
        load = 0.0 if slot.is_by_turn else slot.load()
        heap = self._heap
        entry = (slot.is_least_preferred, load, slot.turn, slot.index, stamp, slot)
        # The slot that was just picked is on top: replace it in one sift.
        if heap and heap[0][5] is slot:
            heapq.heapreplace(heap, entry)
            return
        heapq.heappush(heap, entry)
        if len(heap) > 2 * self._num_slots + SLACK_ENTRIES:
            self._compact()

    def take_turn(self, slot: "Slot") -> None:
        """Move a picked slot behind its equals."""
        turn = slot.turn
        if turn > self.turn:
            self.turn = turn
        else:
            turn = self.turn
        slot.turn = turn + 1.0 / slot.weight

    def first(self) -> "Slot | None":
        """Find the most preferred slot."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if entry[4] == entry[5].stamp:
                return entry[5]
            heapq.heappop(heap)
        return None

    def but(self, avoided: Collection[InstanceId]) -> Iterator[Entry]:
        """Entries of the others, in no order; O(n)."""
        for entry in self._heap:
            if entry[4] == entry[5].stamp and entry[5].instance_id not in avoided:
                yield entry

    def first_rank(self) -> tuple[bool, float, float] | None:
        """Return what `first` is compared by, to compare orders with each other."""
        return None if self.first() is None else self._heap[0][:3]

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if entry[4] == entry[5].stamp]
        heapq.heapify(self._heap)


class VersionedOrder:
    """One `LoadOrder` per policy version in use; a fleet holds one or two at a time."""

    def __init__(self) -> None:
        self._order_of: dict[PolicyVersion, LoadOrder] = {}
        self._only: LoadOrder | None = None
        self._only_version = PolicyVersion(-1)

    def enter(self, slot: "Slot", version: PolicyVersion) -> None:
        order = self._order_of.get(version)
        if order is None:
            order = self._order_of[version] = LoadOrder()
            order.turn = max((o.turn for o in self._order_of.values()), default=0.0)
            self._note_only()
        order.enter(slot)

    def leave(self, slot: "Slot", version: PolicyVersion) -> None:
        order = self._order_of[version]
        order.leave(slot)
        if not len(order):
            del self._order_of[version]
            self._note_only()

    def file(self, slot: "Slot", version: PolicyVersion) -> None:
        self._order_of[version].file(slot)

    def take_turn(self, slot: "Slot", version: PolicyVersion) -> None:
        order = self._order_of[version]
        order.take_turn(slot)
        order.file(slot)

    def newest_version(self) -> PolicyVersion | None:
        """Return the newest version that has a candidate."""
        return max(self._order_of, default=None)

    def first(self, min_version: PolicyVersion | None) -> "Slot | None":
        """Find the most preferred candidate at `min_version` or newer."""
        only = self._only
        if only is not None:
            if min_version is not None and self._only_version < min_version:
                return None
            return only.first()
        return self._first_of_several(min_version)

    def first_but(
        self, avoided: Collection[InstanceId], min_version: PolicyVersion | None
    ) -> "Slot | None":
        """Find the most preferred candidate that is not `avoided`; one pass over the fleet."""
        others = (
            entry
            for version, order in self._order_of.items()
            if min_version is None or version >= min_version
            for entry in order.but(avoided)
        )
        best = min(others, key=lambda entry: entry[:4], default=None)
        return None if best is None else best[5]

    def _first_of_several(self, min_version: PolicyVersion | None) -> "Slot | None":
        best, best_rank = None, None
        for version, order in self._order_of.items():
            if min_version is not None and version < min_version:
                continue
            rank = order.first_rank()
            if rank is not None and (best_rank is None or rank < best_rank):
                best, best_rank = order.first(), rank
        return best

    def _note_only(self) -> None:
        self._only = None
        if len(self._order_of) == 1:
            self._only_version, self._only = next(iter(self._order_of.items()))
