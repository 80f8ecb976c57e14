from random import Random

import msgspec
import pytest

from libra.config.supervision import SupervisionConfig
from libra_supervisor.process.restart import (
    GiveUp,
    RestartAfter,
    RestartBudget,
    RestartPolicy,
    policy_from,
)

STEADY = RestartPolicy(jitter_fraction=0.0, max_without_progress=100)


def delays(budget, times):
    decisions = [budget.on_failure("died", now=t, rng=Random(0)) for t in times]
    return [d.delay_s if isinstance(d, RestartAfter) else None for d in decisions]


@pytest.mark.case("R-B65")
def test_a_fast_loop_backs_off_and_is_given_up_within_the_window():
    assert delays(RestartBudget(STEADY), [0, 1, 2, 3, 4, 5]) == [1, 2, 4, 8, 16, None]


@pytest.mark.case("R-B65")
def test_a_crash_each_twenty_minutes_without_progress_is_given_up_too():
    budget = RestartBudget(RestartPolicy())
    decisions = [budget.on_failure(f"death {k}", now=k * 1200.0, rng=Random(0)) for k in range(4)]
    assert decisions[3] == GiveUp("3 restarts in a row without progress", "death 0", 4)


@pytest.mark.case("R-B65")
def test_a_server_that_serves_and_dies_each_twenty_minutes_is_given_up_too():
    budget = RestartBudget(RestartPolicy())
    decisions = []
    for k in range(4):
        decisions.append(budget.on_failure(f"death {k}", now=k * 1200.0, rng=Random(0)))
        for minute in range(1, 20):
            budget.on_progress(now=k * 1200.0 + minute * 60.0)
    assert [isinstance(d, GiveUp) for d in decisions] == [False, False, False, True]


def test_deaths_far_apart_with_progress_between_them_never_use_up_the_budget():
    budget = RestartBudget(STEADY)
    for k in range(50):
        died_at = k * 2000.0
        budget.on_progress(now=died_at - 1.0)
        assert budget.on_failure("died", now=died_at, rng=Random(0)) == RestartAfter(1.0, 1)
        assert budget.num_failures == 1


def test_where_any_progress_counts_it_counts_at_once():
    budget = RestartBudget(msgspec.structs.replace(RestartPolicy(), stable_s=0.0))
    for k in range(50):
        assert isinstance(budget.on_failure("died", now=k * 700.0, rng=Random(0)), RestartAfter)
        budget.on_progress(now=k * 700.0 + 1.0)


def test_delays_of_a_fleet_that_fell_together_are_spread():
    policy = RestartPolicy(jitter_fraction=0.2)
    seen = {
        RestartBudget(policy).on_failure("died", now=0, rng=Random(seed)).delay_s
        for seed in range(20)
    }
    assert len(seen) == 20
    assert max(seen) - min(seen) > 0.2


def test_the_policy_comes_from_the_configuration():
    policy = policy_from(SupervisionConfig())
    assert policy == RestartPolicy()
