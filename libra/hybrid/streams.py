"""One lane on several connections: which values go on which, and all of them at once.

Between nodes a single TCP connection is as fast as one core copies and sums, and no faster than its
congestion window lets it be. So a lane of many values has several *streams*: connections with a
proof and a hello each, every one with a fixed part of each gradient, in frames of its own. On one
node the values lie in shared memory, and a lane is one stream.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec

from libra import clock
from libra.errors import PeerError
from libra.hybrid.address import LaneHello
from libra.hybrid.channel import POLL_S, Beat, Channel, no_beat

MAX_STREAMS: Final = 8
_USUAL_STREAMS: Final = 4
_STREAM_VALUES: Final = 4 << 20
"""16 MiB: for less another stream costs more than it saves."""

Work: TypeAlias = Callable[[Beat], None]
"""What one stream has to do; it calls the beat while it waits."""


def num_streams_for(count: int) -> int:
    """How many streams a TCP lane of `count` values is worth."""
    return max(1, min(_USUAL_STREAMS, count // _STREAM_VALUES))


def parts_of(count: int, num_streams: int) -> tuple[slice, ...]:
    """What of `count` values goes on each stream; none is empty while there is a value for each."""
    bounds = [count * k // num_streams for k in range(num_streams + 1)]
    return tuple(map(slice, bounds, bounds[1:]))


def side_by_side(works: Sequence[Work], *, beat: Beat, give_up: Callable[[], None]) -> None:
    """Do all works at once, the first of them here; returns when every one is done.

    Raises the first's error, or another's that the first one hears of while it waits: what the
    other side says comes on the first stream. `give_up` has to end the works that are left.
    """
    first, *others = works
    crew = _Crew(others)
    try:
        first(lambda: crew.watch(beat))
        crew.join(beat)
    except BaseException:
        give_up()
        crew.wait()
        raise


class _Crew:
    """Threads, one for each work."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._failures: list[PeerError] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name="lane-stream", daemon=True)
            for work in works
        ]
        for thread in self._threads:
            thread.start()

    def watch(self, beat: Beat) -> None:
        """Raise the error of a work that has failed."""
        beat()
        if self._failures:
            raise self._failures[0]

    def join(self, beat: Beat) -> None:
        for thread in self._threads:
            while thread.is_alive():
                thread.join(POLL_S)
                self.watch(beat)
        if self._failures:
            raise self._failures[0]

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()

    def _guarded(self, work: Work) -> None:
        try:
            work(no_beat)
        except PeerError as error:
            self._failures.append(error)


class Gathering:
    """Streams of members that have proved the key, until all of a member's are there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._there: dict[LaneHello, dict[int, Channel]] = {}

    def gather(
        self, channel: Channel, hello: LaneHello, *, deadline: float
    ) -> tuple[Channel, ...] | None:
        """All streams of the member, for the thread of the last one; None for the others.

        Streams belong together when they say the same of the member. Raises PeerError when one
        comes twice, or not all come before the deadline.
        """
        key = msgspec.structs.replace(hello, stream=0)
        with self._changed:
            there = self._there.setdefault(key, {})
            if hello.stream in there:
                raise PeerError(f"stream {hello.stream} of {hello.replica_id} came twice")
            there[hello.stream] = channel
            if len(there) == hello.num_streams:
                del self._there[key]
                self._changed.notify_all()
                return tuple(there[stream] for stream in range(hello.num_streams))
            left_s = deadline - clock.monotonic()
            if self._changed.wait_for(lambda: len(there) == hello.num_streams, left_s):
                return None
            num_there = len(there)
            self._there.pop(key, None)
        raise PeerError(f"{num_there} of {hello.num_streams} streams of {hello.replica_id} came")
