"""The only reader of time. Under trio's MockClock the asynchronous half is virtual."""

import time

import anyio


def now() -> float:
    """Seconds on the running event loop's monotonic clock."""
    return anyio.current_time()


def monotonic() -> float:
    """Seconds on the process's monotonic clock, for code outside an event loop."""
    return time.monotonic()


def wall_ns() -> int:
    """Nanoseconds since the epoch, for records that people read; never compared between hosts."""
    return time.time_ns()


async def sleep(seconds: float) -> None:
    await anyio.sleep(seconds)


async def sleep_until(deadline: float) -> None:
    """Sleep until `now()` reaches `deadline`; returns at once when it has passed."""
    await anyio.sleep_until(deadline)
