from control_parts import trajectory
from libra.ids import PolicyVersion, PromptId
from libra.rollouts.group import AdmittedGroup, PromptRef
from libra_supervisor.loop.rollout_use import RolloutClock

GROUP = AdmittedGroup(PromptRef(PromptId("p0"), 0, 0), 0, 2)
OTHER = AdmittedGroup(PromptRef(PromptId("p1"), 1, 0), 0, 2)


def opened(*groups):
    clock = RolloutClock()
    for group in groups:
        clock.on_opened(group.group_id, 2)
    return clock


def done(group, index):
    return trajectory(group, index, PolicyVersion(1), 1.0)


def test_time_counts_while_any_sample_is_in_flight():
    clock = opened(GROUP)
    clock.on_started((GROUP.group_id, 0), now=1.0)
    clock.on_started((GROUP.group_id, 1), now=2.0)
    clock.on_finished(done(GROUP, 0), now=4.0)
    clock.on_ended((GROUP.group_id, 1), now=5.0)
    use = clock.take(now=9.0)
    assert use.busy_s == 4.0
    # One token given, two sampled; the sample that gave up is none that ended.
    assert use.finished == ((1, 2),)


def test_a_step_takes_its_own_share_of_what_goes_on():
    clock = opened(GROUP)
    clock.on_started((GROUP.group_id, 0), now=1.0)
    assert clock.take(now=3.0).busy_s == 2.0
    clock.on_finished(done(GROUP, 0), now=4.0)
    assert clock.take(now=5.0).busy_s == 1.0
    assert clock.take(now=6.0).busy_s == 0.0


def test_engines_that_load_weights_do_not_roll_out():
    clock = opened(GROUP)
    clock.on_started((GROUP.group_id, 0), now=0.0)
    clock.on_paused(is_paused=True, now=1.0)
    clock.on_paused(is_paused=False, now=3.0)
    assert clock.take(now=4.0).busy_s == 2.0


def test_samples_of_a_cancelled_group_end_with_it_and_late_news_starts_nothing():
    clock = opened(GROUP, OTHER)
    clock.on_started((GROUP.group_id, 0), now=0.0)
    clock.on_started((OTHER.group_id, 0), now=0.0)
    clock.on_cancelled(GROUP.group_id, now=1.0)
    clock.on_started((GROUP.group_id, 1), now=1.5)
    clock.on_ended((OTHER.group_id, 0), now=2.0)
    assert clock.take(now=9.0).busy_s == 2.0
