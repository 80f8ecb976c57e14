"""A head's end of its lane: lets members in, takes gradients, and gives back the reduced ones.

The methods are called by the rank's main thread; what waits for a network waits in threads.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from libra import clock
from libra.hybrid.address import LaneHello
from libra.hybrid.channel import POLL_S, Beat
from libra.hybrid.checksum import Floats
from libra.hybrid.entrance import Channels, Entrance, Shared
from libra.hybrid.fault import Ballot, Fault
from libra.hybrid.guest import Guest
from libra.hybrid.header import Fence
from libra.hybrid.room import touched
from libra.hybrid.terms import Kept, LaneTerms, Position
from libra.ids import ReplicaId
from libra.wire.hybrid import LaneAddress

MAX_KEPT: Final = 32
"""Mini-batches whose reduced gradients are held for those who are behind. Each is as large as the
gradients of this rank; a guest that is further behind is let go."""

_MAX_DIGESTS: Final = 256


class Contribution(NamedTuple):
    """What a member brings to one mini-batch, good or not."""

    ballot: Ballot
    values: Floats | None
    numbers: tuple[float, ...]


class LaneHead:
    """For every step `begin`; for every mini-batch of it `collect` and `publish`."""

    def __init__(
        self,
        terms: LaneTerms,
        *,
        key: bytes,
        lane: int,
        layout_hash: str,
        host: str = "",
        max_kept: int = MAX_KEPT,
    ) -> None:
        """Listen for members from now on; on TCP at `host` too, when it is not empty."""
        self._terms = terms
        self._changed = threading.Condition()
        self._kept: deque[Kept] = deque()
        self._kept_from: Position | None = None
        self._max_kept = max_kept
        self._spare: list[Floats] = []
        self._is_preparing = False
        self._digest = 0
        """Of the core's weights now."""

        self._digest_of: dict[Position | None, int] = {}
        """Of the weights after a mini-batch."""

        self._guests: dict[ReplicaId, Guest] = {}
        self._awaited: frozenset[ReplicaId] = frozenset()
        self._entrance = Entrance(
            terms, key=key, lane=lane, layout_hash=layout_hash, host=host, admit=self._admit
        )

    @property
    def unix_address(self) -> LaneAddress:
        return self._entrance.unix_address

    @property
    def tcp_address(self) -> LaneAddress | None:
        return self._entrance.tcp_address

    def begin(self, step: int, digest: int, replicas: Collection[ReplicaId]) -> None:
        """`replicas` take part in `step` or follow it; `digest` is that of the weights before it.

        Whoever else is connected is let go.
        """
        at = Position(step)
        with self._changed:
            self._awaited = frozenset(replicas)
            self._digest = digest
            self._prepare()
            if self._kept_from is None:
                self._kept_from = at
            for replica_id in list(self._guests.keys() - self._awaited):
                self._guests.pop(replica_id).close(Fault.GONE, "it is no member any more")
            self._let_go_of_late_ones()
            self._forget()

    def forget_everything(self) -> None:
        """There is no replica: close what is open and keep nothing."""
        with self._changed:
            for guest in self._guests.values():
                guest.close(Fault.GONE, "it is no member any more")
            self._guests.clear()
            self._kept.clear()
            self._spare.clear()
            self._kept_from, self._awaited = None, frozenset()

    def standing(self, replica_id: ReplicaId) -> Ballot:
        """Whether a replica that follows may go on; what has not come yet is no fault."""
        with self._changed:
            guest = self._guests.get(replica_id)
            if guest is None:
                return Ballot(Fault.NONE)
            wanted = self._digest_of.get(guest.applied, guest.digest)
            return Ballot(guest.fault if wanted == guest.digest else Fault.DIGEST)

    def collect(
        self, replica_id: ReplicaId, wanted: Fence, *, deadline: float, beat: Beat
    ) -> Contribution:
        """Wait for a member's gradients until `deadline`; what does not come is a fault."""
        with self._changed:
            while True:
                guest = self._guests.get(replica_id)
                ballot = self._ballot(guest, wanted)
                if ballot is not None or (left_s := deadline - clock.monotonic()) <= 0:
                    break
                self._changed.wait(min(left_s, POLL_S))
                beat()
            if guest is None or ballot is None or ballot.fault is not Fault.NONE:
                return Contribution(ballot or Ballot(Fault.LATE), None, ())
            return Contribution(ballot, guest.values, guest.numbers)

    def release(self, replica_id: ReplicaId) -> None:
        """The values that `collect` gave are not needed any more."""
        with self._changed:
            if (guest := self._guests.get(replica_id)) is not None:
                guest.release()

    def reason_of(self, replica_id: ReplicaId) -> str:
        """What its connection ended with; empty while it is open."""
        with self._changed:
            guest = self._guests.get(replica_id)
            return "" if guest is None else guest.reason

    def dismiss(self, replica_id: ReplicaId, reason: str) -> None:
        """It counts no longer, whatever it sends."""
        with self._changed:
            if (guest := self._guests.pop(replica_id, None)) is not None:
                guest.close(Fault.GONE, reason)
            self._awaited -= {replica_id}

    def buffer(self) -> Floats:
        """Room for reduced gradients, to be filled and given to `publish`."""
        with self._changed:
            values = self._spare.pop() if self._spare else None
            self._prepare()
        return touched(self._terms.count) if values is None else values

    def publish(
        self, fence: Fence, numbers: tuple[float, ...], values: Floats, *, digest: int
    ) -> None:
        """Give reduced gradients to all guests, now or when they come to it. Never waits.

        `digest` is that of the weights which the step with them has made.
        """
        with self._changed:
            entry = Kept(fence, numbers, values)
            self._digest = self._digest_of[entry.at] = digest
            while len(self._digest_of) > _MAX_DIGESTS:
                del self._digest_of[next(iter(self._digest_of))]
            self._kept.append(entry)
            self._let_go_of_late_ones()
            self._forget()
            self._changed.notify_all()

    def close(self) -> None:
        self._entrance.close()
        self.forget_everything()

    def _prepare(self) -> None:
        """Have room ready for the next `buffer`, beside what goes on. With `changed` held."""
        if self._awaited and not self._spare and not self._is_preparing:
            self._is_preparing = True
            threading.Thread(target=self._add_spare, name="lane-room", daemon=True).start()

    def _add_spare(self) -> None:
        values = touched(self._terms.count)
        with self._changed:
            self._is_preparing = False
            if self._awaited:
                self._spare.append(values)
            self._changed.notify_all()

    def _ballot(self, guest: Guest | None, wanted: Fence) -> Ballot | None:
        if guest is None:
            return Ballot(Fault.GONE)
        return guest.ballot(wanted, self._digest)

    def _admit(
        self,
        channels: Channels,
        hello: LaneHello,
        shared: Shared | None,
        welcome: Callable[[], None],
    ) -> None:
        """Called by the entrance's threads."""
        guest = Guest(channels, hello, self._terms, self._changed, self._kept, shared=shared)
        with self._changed:
            refusal = self._refusal_of(guest)
            if not refusal:
                # Before the welcome: who has heard it may count on being known.
                self._guests[hello.replica_id] = guest
        if refusal:
            self._entrance.refuse(channels[0], refusal)
        welcome()
        guest.start()

    def _refusal_of(self, guest: Guest) -> str:
        hello = guest.hello
        if hello.replica_id in self._guests:
            return f"{hello.replica_id} is connected already"
        if self._is_too_late(guest):
            return f"the gradients of step {hello.step} are not kept any more"
        return ""

    def _is_too_late(self, guest: Guest) -> bool:
        return self._kept_from is not None and guest.next_to_send < self._kept_from

    def _let_go_of_late_ones(self) -> None:
        while len(self._kept) > self._max_kept:
            self._drop_oldest()
        for guest in self._guests.values():
            if self._is_too_late(guest):
                guest.close(Fault.LATE, "it is too far behind the core")

    def _forget(self) -> None:
        """Drop what every replica has had; one that is not here yet may need all of it."""
        if not self._awaited <= self._guests.keys():
            return
        while self._kept and not self._kept[0].num_users and self._has_been_sent(self._kept[0]):
            self._drop_oldest()

    def _has_been_sent(self, entry: Kept) -> bool:
        return all(guest.next_to_send > entry.at for guest in self._guests.values())

    def _drop_oldest(self) -> None:
        entry = self._kept.popleft()
        first = self._kept[0].at if self._kept else None
        self._kept_from = first or Position(entry.at.step, entry.at.mini_batch + 1)
        # One that is being sent is left to its sender.
        if not entry.num_users:
            self._spare.append(entry.values)
