"""Deciding over whole runs: lengths drift or only seem to, steps are noisy, changes fail."""

import itertools
from math import inf

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libra.planner.replan import Keep, Switch
from replan_world import Load, World, replan_config

READS = Load(mean=400, sigma=0.6, prompt=12000)
"""Much to train on, little to generate."""

WRITES = Load(mean=4000, sigma=1.0, prompt=256)
NARROW = Load(mean=300, sigma=0.3, prompt=256)
WINDOW = 16
COOLDOWN_S = 300.0

runs = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
seeds = st.integers(0, 2**31)
noises = st.floats(0.0, 0.25)


def world(load=READS, **rest):
    planner = rest.pop("planner", {})
    return World.planned(replan_config(runtime_reconfigure_training=True, **planner), load, **rest)


@given(seed=seeds, noise=noises, load=st.sampled_from([READS, WRITES, NARROW]))
@runs
def test_noise_alone_changes_no_plan(seed, noise, load):
    run = world(load, seed=seed, noise=noise)
    run.run(load, 200)
    assert run.verdicts
    assert run.switches == []


@given(
    seed=seeds,
    noise=st.floats(0.0, 0.15),
    lasts=st.lists(st.integers(40, 90), min_size=2, max_size=5),
)
@runs
def test_every_real_change_is_answered_once_and_within_a_window(seed, noise, lasts):
    run = world(READS, seed=seed, noise=noise)
    run.run(READS, 30)
    changed_at = []
    for index, num_steps in enumerate(lasts):
        changed_at.append(run.step)
        run.run(WRITES if index % 2 == 0 else READS, num_steps)
    assert len(run.switches) == len(changed_at)
    for began, (step, _) in zip(changed_at, run.switches, strict=True):
        assert began < step <= began + WINDOW


@given(seed=seeds, steps_left=st.integers(1, 3))
@runs
def test_nothing_is_changed_when_too_few_steps_are_left_to_earn_it(seed, steps_left):
    planner = {"runtime_switch_cost_prior_s": 200.0}
    run = world(READS, seed=seed, planner=planner, decides_itself=False)
    run.run(WRITES, 12)
    run.total_steps = run.step + steps_left
    verdict = run.decide(is_asked=True)
    assert isinstance(verdict, Keep)
    assert verdict.numbers["horizon_steps"] == steps_left
    run.total_steps = inf
    assert isinstance(run.decide(is_asked=True), Switch)


@given(seed=seeds, noise=noises)
@runs
def test_after_a_failure_nothing_is_tried_before_the_cooldown_is_over(seed, noise):
    run = world(READS, seed=seed, noise=noise, fails=True)
    run.run(READS, 20)
    tried_at, num_seen = [], 0
    for _ in range(120):
        run.one_step(WRITES)
        if len(run.verdicts) > num_seen and isinstance(run.verdicts[-1][1], Switch):
            tried_at.append(run.now)
        num_seen = len(run.verdicts)
    assert run.switches == []
    waits = [later - at for at, later in itertools.pairwise(tried_at)]
    least = [COOLDOWN_S * 2 ** min(index, 4) for index in range(len(waits))]
    assert all(waited >= bound for waited, bound in zip(waits, least, strict=True))


@given(
    seed=seeds,
    load=st.sampled_from([READS, WRITES, NARROW]),
    least_rollout=st.integers(1, 4),
    least_beside_hybrids=st.integers(0, 4),
    least_train=st.integers(1, 3),
)
@runs
def test_no_plan_that_is_wanted_is_below_the_minima(
    seed, load, least_rollout, least_beside_hybrids, least_train
):
    minima = {
        "min_rollout_gpus": least_rollout,
        "min_train_gpus": least_train,
        "elastic_hybrid_min_rollout_gpus": least_beside_hybrids,
    }
    run = world(WRITES, seed=seed, planner=minima)
    run.run(load, 20)
    run.run(READS, 40)
    for _, switch in run.switches:
        assert switch.plan.num_rollout_gpus >= least_rollout
        assert switch.plan.train.world_size >= least_train
        if switch.plan.hybrids:
            assert switch.plan.num_rollout_gpus >= least_beside_hybrids


@given(seed=seeds, noise=noises)
@runs
def test_every_verdict_says_its_numbers_and_no_slot_has_two_owners(seed, noise):
    run = world(READS, seed=seed, noise=noise)
    for load in (READS, WRITES, NARROW):
        run.run(load, 30)
        run.decide(is_asked=True)
    for _, verdict in run.verdicts:
        assert verdict.numbers
        assert all(abs(value) < inf for value in verdict.numbers.values())
        assert any(character.isdigit() for character in verdict.reason)
        plan = verdict.plan if isinstance(verdict, Switch) else verdict.candidate
        if plan is not None:
            owned = list(plan.train.slots)
            owned += [slot for part in (*plan.instances, *plan.hybrids) for slot in part.slots]
            assert len(owned) == len(set(owned))
            assert set(owned) <= set(range(8))


def followed(seed, loads):
    """Totals of a run that decides for itself and of one on the plan it began with."""
    run, kept = (world(READS, seed=seed, noise=0.1, decides_itself=d) for d in (True, False))
    for load in loads:
        run.one_step(load)
        kept.one_step(load)
    return run, kept


@pytest.mark.parametrize("lasts", [1, 2, 3, 4, 6, 8, 12, 25])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_load_that_keeps_changing_its_level_costs_little_more_than_standing_still(lasts, seed):
    loads = [WRITES if step // lasts % 2 else READS for step in range(120)]
    run, kept = followed(seed, loads)
    assert run.now < 1.03 * kept.now
    assert len(run.switches) <= max(3, 120 // lasts if lasts >= WINDOW / 2 else 0)


@given(seed=seeds)
@runs
def test_steps_of_either_load_by_chance_cost_little_more_than_standing_still(seed):
    rng = np.random.default_rng(seed)
    loads = [READS if drawn < 0.5 else WRITES for drawn in rng.random(120)]
    run, kept = followed(seed, loads)
    assert run.now < 1.05 * kept.now
    assert len(run.switches) <= 6


def test_equal_observations_give_equal_verdicts():
    def verdicts():
        run = world(READS, seed=5)
        run.run(READS, 30)
        run.run(WRITES, 30)
        return run.verdicts

    assert verdicts() == verdicts()


@pytest.mark.parametrize("seed", range(3))
def test_a_gain_that_one_step_does_not_pay_for_is_taken_for_fifty(seed):
    def verdict(payback_steps):
        planner = {
            "runtime_payback_steps": payback_steps,
            "runtime_switch_cost_prior_s": 100.0,
        }
        run = world(READS, seed=seed, planner=planner, decides_itself=False)
        run.run(WRITES, 6)
        return run.decide(is_asked=True)

    assert isinstance(verdict(1), Keep)
    assert isinstance(verdict(50), Switch)
