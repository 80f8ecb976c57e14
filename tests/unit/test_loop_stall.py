import anyio
import pytest
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from libra import clock
from libra_supervisor.loop.stall import BOUNDS_S, PERIOD_S, WINDOW_S, StallMeter, measure_stalls

CLOCK = trio.testing.MockClock(autojump_threshold=0)


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": CLOCK}


def block(seconds):
    """Let time pass without giving control back, as time.sleep or a slow fsync would."""
    CLOCK.jump(seconds)


def counted_above(meter, bound_s):
    buckets = dict(meter.buckets())
    return buckets["+Inf"] - buckets[str(bound_s)]


@pytest.mark.anyio
async def test_a_blocked_loop_shows_with_its_length():
    meter = StallMeter()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(measure_stalls, meter)
        await clock.sleep(1.0)
        assert meter.longest_s(now=clock.now()) == pytest.approx(0.0, abs=1e-6)
        assert counted_above(meter, 0.001) == 0
        block(0.3)
        await clock.sleep(0.1)
        longest = meter.longest_s(now=clock.now())
        assert 0.3 - PERIOD_S <= longest <= 0.3
        assert counted_above(meter, 0.25) == 1
        assert meter.sum_s == pytest.approx(longest, abs=1e-6)
        await clock.sleep(WINDOW_S)
        assert meter.longest_s(now=clock.now()) == pytest.approx(0.0, abs=1e-6)
        assert counted_above(meter, 0.25) == 1, "the histogram is of the whole run"
        tasks.cancel_scope.cancel()


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(0.0, 20.0))))
def test_the_longest_of_the_window_and_every_bucket_are_as_counted(waits):
    meter, now, seen = StallMeter(), 0.0, []
    for wait_s, late_s in waits:
        now += wait_s
        seen.append((now, late_s))
        meter.on_woken(late_s=late_s, now=now)
    recent = [late_s for at, late_s in seen if at > now - WINDOW_S]
    assert meter.longest_s(now=now) == max(recent, default=0.0)
    for bound, count in meter.buckets():
        assert count == sum(late_s <= float(bound) for _, late_s in seen)
    assert len(meter.buckets()) == len(BOUNDS_S) + 1
