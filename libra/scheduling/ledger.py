"""Who holds a place where. Each reservation is given back exactly once, by its serial."""

from typing import TYPE_CHECKING

from libra.scheduling.request import Reservation

if TYPE_CHECKING:
    from libra.scheduling.request import RouteRequest
    from libra.scheduling.slot import Slot


class Ledger:
    """Open reservations of all incarnations, the retired ones included."""

    def __init__(self) -> None:
        self._slot_of: dict[int, Slot] = {}
        self._last_serial = 0
        self._num_releases = 0
        self.num_repeated_releases = 0
        """Releases of what was not open: late or doubled; they change nothing."""

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def revision(self) -> int:
        """Grows with every change of what is in flight."""
        return self._last_serial + self._num_releases

    def is_open(self, reservation: Reservation) -> bool:
        return reservation.serial in self._slot_of

    def next_serial(self) -> int:
        """Draw a number that no reservation of this ledger has had."""
        self._last_serial += 1
        return self._last_serial

    def reserve(
        self, slot: "Slot", request: "RouteRequest", num_tokens: int, now: float
    ) -> Reservation:
        """Count one request of `num_tokens` on `slot`, whose policy version is known."""
        self._last_serial = serial = self._last_serial + 1
        self._slot_of[serial] = slot
        slot.num_requests += 1
        slot.num_tokens += num_tokens
        return Reservation(
            serial,
            slot.instance_id,
            slot.incarnation,
            slot.policy_version,
            num_tokens,
            request.category,
            now,
        )

    def release(self, reservation: Reservation) -> "Slot | None":
        """Return the slot that `reservation` was on, now without it; None when it was not open."""
        slot = self._slot_of.pop(reservation.serial, None)
        if slot is None:
            self.num_repeated_releases += 1
            return None
        self._num_releases += 1
        slot.num_requests -= 1
        slot.num_tokens -= reservation.num_tokens
        return slot
