import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_supervisor.instances.health import Health, HealthMonitor

STALL_S, SILENCE_S = 120.0, 20.0


def monitor(*, is_ready=True):
    made = HealthMonitor(stall_s=STALL_S, silence_s=SILENCE_S, now=0.0)
    if is_ready:
        made.on_health("healthy", now=0.0)
    return made


def look(health, now, *, tokens=100.0, running=1.0, in_flight=1, answer="healthy"):
    health.on_health(answer, now=now)
    health.on_progress(num_tokens=tokens, num_running=running, num_in_flight=in_flight, now=now)
    return health.health(now=now)


def test_a_server_is_loading_until_it_has_answered_once_however_long_that_takes():
    health = monitor(is_ready=False)
    assert look(health, 800.0, answer="no_answer") == Health("loading")
    assert look(health, 801.0) == Health("ready")


@pytest.mark.case("R-B45")
def test_a_server_that_hangs_behind_a_healthy_page_is_probed_and_found_dead():
    health = monitor()
    assert look(health, 0.0) == Health("ready")
    for now in range(1, 120, 3):
        assert look(health, float(now)).state == "ready"
    doubted = look(health, 120.0)
    assert (doubted.state, doubted.needs_probe) == ("suspect", True)
    assert "no progress for 120 s while requests run" in doubted.reason
    health.on_probe_sent()
    assert look(health, 123.0).needs_probe is False
    health.on_probe(has_passed=False, now=130.0)
    assert look(health, 131.0).state == "dead"


@pytest.mark.case("R-B45")
def test_an_idle_server_is_never_suspected():
    health = monitor()
    for now in range(0, 10_000, 100):
        assert look(health, float(now), running=0.0, in_flight=0) == Health("ready")


def test_requests_that_the_frozen_gauge_does_not_show_count_as_running():
    health = monitor()
    look(health, 0.0, running=0.0, in_flight=0)
    for now in range(10, 120, 10):
        assert look(health, float(now), running=0.0, in_flight=3).state == "ready"
    assert look(health, 121.0, running=0.0, in_flight=3).state == "suspect"


@pytest.mark.case("R-B32")
def test_time_outs_under_load_are_no_evidence_while_the_counters_move():
    health = monitor()
    for now in range(0, 1000, 3):
        state = look(health, float(now), tokens=float(now), answer="no_answer").state
        assert state == "ready"


def test_silence_without_progress_is_suspect_and_a_passed_probe_clears_it():
    health = monitor()
    look(health, 0.0, running=0.0, in_flight=0)
    last = None
    for now in (5.0, 10.0, 15.0, 20.0):
        health.on_health("no_answer", now=now)
        health.on_progress(num_tokens=None, num_running=None, num_in_flight=0, now=now)
        last = health.health(now=now)
    assert (last.state, last.reason) == ("suspect", "it has been silent for 20 s")
    health.on_probe_sent()
    health.on_probe(has_passed=True, now=21.0)
    assert health.health(now=21.0) == Health("ready")


def test_a_page_that_cannot_be_read_is_no_stall_when_nothing_is_in_flight():
    health = monitor()
    for now in range(0, 600, 10):
        state = look(health, float(now), tokens=None, running=None, in_flight=0).state
        assert state == "ready"


def test_one_unhealthy_answer_is_suspect_two_are_dead():
    health = monitor()
    assert look(health, 1.0, answer="unhealthy") == Health("suspect", "it calls itself unhealthy")
    assert look(health, 2.0).state == "ready"
    look(health, 3.0, answer="unhealthy")
    assert look(health, 4.0, answer="unhealthy").state == "dead"


def test_a_paused_or_reloading_server_owes_no_progress():
    health = monitor()
    look(health, 0.0, running=4.0, in_flight=4)
    health.on_excused(is_excused=True, now=1.0)
    for now in range(10, 1000, 10):
        assert look(health, float(now), running=4.0, in_flight=4).state == "ready"
    health.on_excused(is_excused=False, now=1000.0)
    assert look(health, 1119.0, running=4.0, in_flight=4).state == "ready"
    assert look(health, 1120.0, running=4.0, in_flight=4).state == "suspect"


def test_a_probe_that_fails_after_progress_came_back_kills_nobody():
    health = monitor()
    look(health, 0.0)
    assert look(health, 130.0).needs_probe
    health.on_probe_sent()
    look(health, 131.0, tokens=200.0)
    health.on_probe(has_passed=False, now=132.0)
    assert look(health, 133.0, tokens=300.0) == Health("ready")


def test_death_is_final():
    health = monitor()
    look(health, 1.0, answer="unhealthy")
    look(health, 2.0, answer="unhealthy")
    assert look(health, 3.0, tokens=999.0).state == "dead"


@given(
    st.lists(
        st.tuples(
            st.floats(0, 30),
            st.sampled_from(["healthy", "no_answer"]),
            st.integers(0, 4),
        )
    )
)
def test_a_server_that_progresses_at_every_look_is_never_doubted(looks):
    health, now = monitor(), 0.0
    for number, (wait_s, answer, in_flight) in enumerate(looks):
        now += wait_s
        state = look(health, now, tokens=float(number), in_flight=in_flight, answer=answer).state
        assert state == "ready"
