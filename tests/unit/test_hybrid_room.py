"""Memory for gradients is touched before the step that needs it."""

import mmap
import struct
import time
from pathlib import Path

from lanes import COUNT, HYBRID, head, member
from libra import clock
from libra.hybrid.channel import SharedValues
from libra.hybrid.room import touched

WITHIN_S = 60.0
_ENTRY_BYTES = 8
_PRESENT = 1 << 63


def share_present(values):
    """Of the pages that lie wholly inside."""
    first = -(-values.ctypes.data // mmap.PAGESIZE)
    end = (values.ctypes.data + values.nbytes) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(first * _ENTRY_BYTES)
        raw = pages.read((end - first) * _ENTRY_BYTES)
    entries = struct.unpack(f"{end - first}Q", raw)
    return sum(bool(entry & _PRESENT) for entry in entries) / len(entries)


def test_new_room_is_there_and_zero():
    values = touched(COUNT)
    assert share_present(values) == 1.0
    assert not values.any()


def test_memory_that_two_processes_share_is_there_when_the_lane_opens():
    values = SharedValues.create(COUNT)
    assert share_present(values.values) == 1.0
    values.close_descriptor()


def test_a_guest_is_let_in_with_room_for_what_it_is_going_to_send():
    with head() as one:
        member(one.unix_address)
        (guest,) = one._guests.values()
        assert share_present(guest.values) == 1.0


def test_room_for_reduced_gradients_comes_about_while_the_step_runs():
    with head() as one:
        assert not one._spare
        one.begin(1, 0, [HYBRID])
        until_spare(one)
        room = one._spare[0]
        assert share_present(room) == 1.0
        assert one.buffer() is room
        until_spare(one)
        one.forget_everything()
        assert not one._spare


def test_nothing_is_made_ready_for_nobody():
    with head() as one:
        one.begin(1, 0, [])
        assert not one._is_preparing
        assert not one._spare


def until_spare(one):
    end_at = clock.monotonic() + WITHIN_S
    while not one._spare:
        assert clock.monotonic() < end_at
        time.sleep(0.001)
