"""Lending all of rollout: what the planner weighs, and when it leaves it alone."""

from math import inf

import pytest
from msgspec.structs import replace

from libra.planner.lending import fewest_rollout_gpus
from libra.planner.plan import Plan
from libra.planner.replan import Keep, Switch, answer
from libra.planner.replan_costs import SwitchCost
from planner_cases import MEASURED_1_8B
from replan_world import Load, World, replan_config

READS = Load(mean=400, sigma=0.6, prompt=12000)
ON = {
    "runtime_reconfigure_training": True,
    "elastic_hybrid_min_rollout_gpus": 0,
    "allowed_rollout_tp": [1],
    "min_rollout_gpus": 1,
}


def on_two_gpus(**planner) -> World:
    """A core and the only server, whose GPU holds a replica."""
    config = replan_config(arch=MEASURED_1_8B, **{**ON, **planner})
    training, rollout = config.training, config.rollout
    config = replace(
        config,
        training=replace(training, train_gpus=1),
        rollout=replace(rollout, rollout_gpus=1, max_head_offpolicyness=64),
    )
    return World.planned(config, READS, decides_itself=False)


def asked(run: World, *, lead_steps: float, costs: SwitchCost | None = None):
    question = run.replanner.question(run.plan, 0.0, inf, is_asked=True, lead_steps=lead_steps)
    if costs is not None:
        question = replace(question, cost_of=dict.fromkeys(question.cost_of, costs))
    return answer(question)


def lent(run: World, plan: Plan) -> bool:
    return not plan.instances and len(plan.hybrids) == 1 and plan.train == run.plan.train


@pytest.mark.parametrize(
    ("num_replicas", "serves_nothing", "beside", "fewest"),
    [(0, True, 0, 2), (1, True, 0, 0), (1, False, 0, 2), (1, True, 1, 2), (1, False, 3, 3)],
)
def test_only_replicas_with_leave_take_rollout_below_its_minimum(
    num_replicas, serves_nothing, beside, fewest
):
    found = fewest_rollout_gpus(
        num_replicas=num_replicas,
        serves_nothing=serves_nothing,
        least=2,
        least_beside_hybrids=beside,
    )
    assert found == fewest


def test_the_last_server_is_lent_when_the_batches_that_are_ready_are_worth_both_changes():
    run = on_two_gpus()
    price = SwitchCost(mean_s=30.0, deviation_s=0.0, num_measured=3)
    verdict = asked(run, lead_steps=40, costs=price)
    assert isinstance(verdict, Switch), verdict.reason
    assert (verdict.kind, lent(run, verdict.plan)) == ("to_training", True)
    numbers = verdict.numbers
    assert (numbers["horizon_steps"], numbers["cost_s"]) == (40, 60.0)
    # As many batches fewer as make it earn less than the way there and back.
    fewer = int(numbers["price_s"] / numbers["sure_gain_s"])
    assert 1 <= fewer < 40
    kept = asked(run, lead_steps=fewer, costs=price)
    assert isinstance(kept, Keep)
    assert "not enough: " in kept.reason


def test_without_a_batch_or_without_leave_it_is_no_candidate():
    free = SwitchCost(mean_s=0.0, deviation_s=0.0, num_measured=3)
    for run, lead_steps in (
        (on_two_gpus(), 0.0),
        (on_two_gpus(elastic_hybrid_min_rollout_gpus=1), 40.0),
        (on_two_gpus(runtime_reconfigure_training=False), 40.0),
    ):
        verdict = asked(run, lead_steps=lead_steps, costs=free)
        assert isinstance(verdict, Keep)
        assert verdict.candidate is None


def test_a_loan_is_left_alone_however_little_is_left():
    run = on_two_gpus()
    price = SwitchCost(mean_s=1.0, deviation_s=0.0, num_measured=3)
    run.plan = asked(run, lead_steps=40, costs=price).plan
    verdict = asked(run, lead_steps=3)
    assert isinstance(verdict, Keep)
    assert "the last server is lent while there is something to train on, 3 batches now" in (
        verdict.reason
    )


def test_after_a_server_came_back_by_itself_nothing_is_changed_for_a_while():
    run = on_two_gpus(runtime_replan_cooldown_s=300)
    run.run(READS, 12)
    assert run.replanner.due(run.now)
    run.replanner.on_given_back(run.now)
    assert not run.replanner.due(run.now + 299)
    assert run.replanner.due(run.now + 300)
    # Steps so far were those of two plans.
    assert run.replanner.question(run.plan, run.now, inf).times is None
