"""When an event is handled, in both kinds of time."""

import msgspec


class Moment(msgspec.Struct, frozen=True):
    """One reading of the clocks, taken by the loop and passed to every decision."""

    now: float
    """Seconds on the event loop's monotonic clock: for durations and deadlines."""

    wall_ns: int
    """Nanoseconds since the epoch: for records that people read."""
