"""What one decision may choose from, and what it says when there is nothing to choose."""

import pytest
from msgspec.structs import replace

from libra.errors import InvariantError
from libra.planner.calibration import book_of
from libra.planner.cost_models import described
from libra.planner.demand import observed_demand, prior_demand
from libra.planner.plan import plan_in_words
from libra.planner.replan import Keep, Replanner, Switch, answer
from libra.planner.replan_candidates import CandidateSearch, bounds_of
from planner_cases import MEASURED_1_8B
from replan_world import Load, World, replan_config, step_seconds_of

READS = Load(mean=400, sigma=0.6, prompt=12000)
WRITES = Load(mean=4000, sigma=1.0, prompt=256)


def begun(load, **planner):
    """Planned for the other load, and asked by nobody yet."""
    other = WRITES if load is READS else READS
    run = World.planned(replan_config(**planner), other, decides_itself=False, seed=2)
    run.run(load, 8)
    return run


def asked(run):
    return run.decide(is_asked=True)


def with_one_small_instance(run):
    """One GPU serves where four could."""
    (first, *_) = run.plan.instances
    small = replace(first, tp=2, slots=first.slots[:2])
    run.plan = replace(run.plan, instances=(small,))
    return run


def test_without_leave_to_change_training_only_instances_differ():
    run = with_one_small_instance(World.planned(replan_config(), WRITES, decides_itself=False))
    run.run(WRITES, 8)
    train = run.plan.train
    verdict = asked(run)
    assert isinstance(verdict, Switch)
    assert verdict.kind == "rollout"
    assert verdict.plan.train == train
    assert verdict.plan.num_rollout_gpus == 4


def test_the_verdict_is_the_plan_that_the_model_finds_fastest():
    run = begun(WRITES, runtime_reconfigure_training=True)
    old = run.plan
    verdict = asked(run)
    lengths = WRITES.lengths(run.rng, 2400, run.config.rollout.max_new_tokens)
    demand = observed_demand(run.config, lengths)
    before, after = (step_seconds_of(run.config, plan, demand) for plan in (old, verdict.plan))
    assert after < 0.9 * before
    assert verdict.numbers["candidate_step_s"] == pytest.approx(after, rel=0.15)


def lending(load, **planner):
    """A model of which one GPU holds a replica."""
    return begun(load, arch=MEASURED_1_8B, runtime_reconfigure_training=True, **planner)


def test_replicas_are_lent_to_training_before_the_core_is_taken_apart():
    run = lending(READS)
    core = run.plan.train
    verdict = asked(run)
    assert verdict.kind == "to_training"
    assert verdict.plan.train == core
    assert [len(hybrid.slots) for hybrid in verdict.plan.hybrids] == [1, 1]


def test_replicas_go_back_to_rollout_when_it_needs_them():
    run = lending(READS)
    core = run.plan.train
    asked(run)
    assert run.plan.hybrids
    run.run(WRITES, 20)
    verdict = asked(run)
    assert verdict.kind == "to_rollout"
    assert verdict.plan.hybrids == ()
    assert verdict.plan.train == core


def numbers_of_replicas(run):
    """In the plans that the run could go over to."""
    config, plan = run.config, run.plan
    search = CandidateSearch(
        config,
        plan,
        prior_demand(config),
        run.replanner.book,
        bounds_of(config, num_gpus=8),
        why_not=lambda _plan: "",
    )
    return sorted(len(it.plan.hybrids) for it in search.candidates() if it.kind == "to_training")


@pytest.mark.parametrize(("least", "num_replicas"), [(0, 3), (2, 2), (3, 1)])
def test_what_rollout_has_to_keep_is_never_borrowed(least, num_replicas):
    run = lending(READS, elastic_hybrid_min_rollout_gpus=least)
    assert numbers_of_replicas(run) == list(range(1, num_replicas + 1))


@pytest.mark.parametrize(("step", "found"), [(1, [1, 2, 3]), (2, [2]), (4, [])])
def test_replicas_change_sides_in_steps_of_the_splits_granularity(step, found):
    run = lending(READS, allocation_granularity_gpus=step)
    assert run.plan.num_rollout_gpus == 4
    assert numbers_of_replicas(run) == found


def test_gpus_that_no_instance_fits_into_are_no_rollout():
    run = begun(
        READS,
        arch=MEASURED_1_8B,
        runtime_reconfigure_training=True,
        allocation_granularity_gpus=4,
        allowed_rollout_tp=[2],
        min_rollout_gpus=3,
    )
    verdict = asked(run)
    plan = verdict.plan if isinstance(verdict, Switch) else verdict.candidate
    assert plan is None or plan.num_rollout_gpus >= 3


def test_a_replica_whose_optimizer_does_not_fit_is_no_candidate():
    only = {"allowed_train_tp": [2], "allowed_train_pp": [1], "allowed_rollout_tp": [2]}
    verdict = asked(begun(READS, runtime_reconfigure_training=True, **only))
    assert verdict.kind == "reshape"
    assert verdict.plan.hybrids == ()


def test_no_rank_of_a_replica_is_left_without_a_sample():
    run = lending(READS)
    training = replace(run.config.training, batch_size=5, mini_batch_size=5)
    few = replace(run.config, training=training)
    replanner = Replanner(few, num_gpus=8, book=run.replanner.book)
    verdict = replanner.decide(run.plan, 0.0, 100.0, is_asked=True)
    plan = verdict.plan if isinstance(verdict, Switch) else verdict.candidate
    assert plan.train.dp + len(plan.hybrids) <= 5


def test_plan_only_writes_the_training_change_down_and_makes_none():
    run = begun(WRITES, runtime_reconfigure_training=True, runtime_training_pool_plan_only=True)
    verdict = asked(run)
    assert isinstance(verdict, Keep)
    assert "runtime_training_pool_plan_only is true, and worth it: " in verdict.reason
    assert verdict.is_recorded
    assert plan_in_words(verdict.candidate) in verdict.reason
    assert verdict.candidate.train != run.plan.train
    assert verdict.numbers["recorded_earned_s"] > verdict.numbers["recorded_price_s"]


def test_plan_only_still_lets_rollout_change():
    config = replan_config(runtime_reconfigure_training=True, runtime_training_pool_plan_only=True)
    run = with_one_small_instance(World.planned(config, WRITES, decides_itself=False))
    run.run(READS, 4)
    run.run(WRITES, 8)
    train = run.plan.train
    verdict = asked(run)
    assert isinstance(verdict, Switch)
    assert verdict.kind == "rollout"
    assert verdict.plan.train == train


def test_servers_of_others_are_not_changed():
    run = begun(WRITES, runtime_manage_rollout_processes=False, runtime_reconfigure_training=True)
    verdict = asked(run)
    assert isinstance(verdict, Keep)
    assert "runtime_manage_rollout_processes is false" in verdict.reason


def test_without_a_description_of_the_hardware_nothing_is_priced():
    run = begun(WRITES)
    run.replanner.book = None
    verdict = asked(run)
    assert isinstance(verdict, Keep)
    assert "nothing can be priced" in verdict.reason
    assert verdict.numbers["num_steps_observed"] == 6


def test_a_plan_under_which_nothing_serves_is_left_whatever_it_costs():
    run = begun(WRITES, runtime_switch_cost_prior_s=1e6)
    run.plan = replace(run.plan, instances=())
    verdict = asked(run)
    assert isinstance(verdict, Switch)
    assert "nothing serves under the plan in force" in verdict.reason


def test_where_no_plan_would_serve_the_verdict_says_so():
    run = begun(WRITES)
    config = replan_config(min_rollout_gpus=5)
    run.plan = replace(run.plan, instances=())
    pinned = Replanner(config, num_gpus=8, book=run.replanner.book)
    verdict = pinned.decide(run.plan, 0.0, 100.0, is_asked=True)
    assert isinstance(verdict, Keep)
    assert "nothing serves, and no plan would" in verdict.reason


def test_a_core_that_no_split_allows_is_kept():
    run = begun(WRITES)
    config = replan_config(
        runtime_reconfigure_training=True, allocation_granularity_gpus=8, allowed_rollout_tp=[4]
    )
    pinned = Replanner(config, num_gpus=8, book=run.replanner.book)
    verdict = pinned.decide(run.plan, 0.0, 100.0, is_asked=True)
    assert isinstance(verdict, Keep)
    assert verdict.candidate is None


def test_at_the_end_of_the_run_nobody_looks_at_the_plan():
    run = begun(WRITES, runtime_reconfigure_training=True)
    run.total_steps = run.step
    verdict = asked(run)
    assert isinstance(verdict, Keep)
    assert "0.0 steps are left" in verdict.reason


def test_without_online_replanning_the_prior_is_the_demand_and_nothing_is_due():
    run = begun(WRITES, runtime_online_replanning=False, prior_response_mean_tokens=321)
    assert not run.replanner.due(run.now + 1e9)
    verdict = asked(run)
    assert "prior: mean 321 response tokens" in verdict.reason
    assert verdict.numbers["num_steps_observed"] == 0


def test_the_cooldown_holds_back_but_not_an_operator():
    run = begun(WRITES, runtime_reconfigure_training=True)
    run.fails = True
    assert isinstance(asked(run), Switch)
    run.run(WRITES, 1)
    held = run.decide()
    assert isinstance(held, Keep)
    assert "of the cooldown are left" in held.reason
    assert 0 < held.numbers["cooldown_left_s"] <= 300
    assert isinstance(asked(run), Switch)


def test_reasons_that_arise_in_the_cooldown_wait_for_its_end():
    run = begun(WRITES, runtime_reconfigure_training=True)
    run.fails = True
    asked(run)
    run.run(WRITES, 1)
    while not run.replanner.due(run.now + 1e6):
        run.run(WRITES, 1)
    ended_at = run.now
    assert not run.replanner.due(ended_at - 1e6)
    assert run.replanner.due(ended_at + 1e6)


def test_only_steps_of_the_plan_in_force_are_held_against_the_model():
    run = begun(WRITES, runtime_reconfigure_training=True)
    assert asked(run).kind == "reshape"
    run.run(WRITES, 2)
    assert run.replanner.question(run.plan, run.now, 100.0).times is None
    run.run(WRITES, 1)
    assert run.replanner.question(run.plan, run.now, 100.0).times.num_steps == 1


def test_while_a_change_is_made_nothing_is_due():
    run = begun(WRITES, runtime_reconfigure_training=True)
    verdict = run.replanner.decide(run.plan, run.now, 100.0, is_asked=True)
    run.replanner.on_switch_begun(verdict)
    assert run.replanner.is_switching
    run.run(WRITES, 20)
    assert not run.replanner.due(run.now)
    run.replanner.on_switched(5.0, run.now, ok=True)
    assert not run.replanner.is_switching


def test_the_cost_of_our_own_changes_replaces_the_prior():
    run = begun(WRITES, runtime_reconfigure_training=True)
    run.switch_s = 33.0
    assert asked(run).numbers["num_costs_measured"] == 0
    run.run(WRITES, 3)
    run.run(READS, 20)
    verdict = asked(run)
    assert verdict.numbers["num_costs_measured"] == 1
    assert 20 < verdict.numbers["cost_s"] < 90


def test_an_end_that_nobody_began_is_a_bug():
    run = begun(WRITES)
    with pytest.raises(InvariantError, match="not begun"):
        run.replanner.on_switched(1.0, 1.0, ok=True)


def test_a_question_is_answered_from_what_was_seen_when_it_was_asked():
    run = begun(WRITES, runtime_reconfigure_training=True)
    question = run.replanner.question(run.plan, run.now, 100.0, is_asked=True)
    before = answer(question)
    run.run(READS, 20)
    assert answer(question) == before


def test_slots_that_stand_idle_are_part_of_what_is_planned_for():
    config = replan_config(runtime_reconfigure_training=True, prior_response_mean_tokens=4000)
    run = World.planned(config, WRITES)
    larger = Replanner(config, num_gpus=16, book=book_of(*described(config)))
    verdict = larger.decide(run.plan, 0.0, 100.0, is_asked=True)
    assert isinstance(verdict, Switch)
    used = verdict.plan.train.world_size + verdict.plan.num_rollout_gpus
    assert used + verdict.plan.num_hybrid_gpus > 8
