import msgspec
import pytest

from libra.config.rollout import TpBucket
from libra.errors import ConfigError
from libra.simulate.comparison import compare
from libra.simulate.lengths import GeneratedLengths
from libra.simulate.render import render_comparison, render_simulation
from libra.simulate.run import simulate
from libra.simulate.scenarios import colocated, configured, mixed, planned, static_splits
from planner_cases import H200_141G, MEASURED_1_8B, grp_config


def replaced(config, **sections):
    """The configuration with single options of its sections replaced."""
    return msgspec.structs.replace(
        config,
        **{
            name: msgspec.structs.replace(getattr(config, name), **options)
            for name, options in sections.items()
        },
    )


def with_load_metric(config, load_metric, **options):
    scheduling = msgspec.structs.replace(
        config.heterogeneous_rollout.scheduling, load_metric=load_metric, **options
    )
    return replaced(config, heterogeneous_rollout={"scheduling": scheduling})


def small(**sections):
    """Eight H200 and a 1.8 B model: a step is a few seconds of virtual time."""
    rollout = {"max_head_offpolicyness": 1.0, "max_concurrent_rollouts": 128}
    rollout |= sections.pop("rollout", {})
    return grp_config(
        num_gpus=8,
        arch=MEASURED_1_8B,
        hardware=H200_141G,
        batch_size=64,
        max_new_tokens=2048,
        planner={"allocation_granularity_gpus": 1, **sections.pop("planner", {})},
        rollout=rollout,
        **sections,
    )


LENGTHS = GeneratedLengths(seed=3, mean_tokens=800, sigma=0.8, longest=2048, prompt_tokens=256)


def run(config, *, num_steps=5, scenario=None):
    scenario = scenario or configured(config, LENGTHS.demand(config))
    return simulate(scenario, LENGTHS, num_steps=num_steps, seed=3)


def test_equal_seeds_give_equal_runs():
    assert run(small()) == run(small())


@pytest.mark.parametrize("bound", [0.0, 1.0, 3.0])
def test_no_batch_is_staler_than_allowed(bound):
    config = small(rollout={"max_head_offpolicyness": bound, "max_concurrent_rollouts": 256})
    result = run(config, num_steps=7)
    assert max(step.max_staleness for step in result.steps) <= bound


def test_steps_follow_one_another_and_each_trains_a_whole_batch():
    result = run(small())
    assert [step.step for step in result.steps] == [1, 2, 3, 4, 5]
    assert {step.num_trajectories for step in result.steps} == {64}
    for step in result.steps:
        assert step.started_at < step.ended_at < step.freed_at
    for before, after in zip(result.steps, result.steps[1:], strict=False):
        assert after.started_at >= before.freed_at


def test_a_looser_staleness_bound_lets_rollout_and_training_overlap():
    strict = run(small(rollout={"max_head_offpolicyness": 0.0}))
    loose = run(small())
    assert loose.tokens_per_gpu_s > 1.2 * strict.tokens_per_gpu_s


def test_fewer_syncs_stop_the_engines_less_often():
    config = small(rollout={"max_head_offpolicyness": 4.0})
    every, rare = run(config), run(replaced(config, weights={"sync_interval": 5}))
    assert sum(step.freed_at > step.ended_at for step in every.steps) == 5
    assert sum(step.freed_at > step.ended_at for step in rare.steps) == 1


@pytest.mark.parametrize(
    "weights",
    [
        {"rollout_weight_pause_mode": "keep"},
        {"rollout_weight_pause_mode": "wait"},
        {"rollout_weight_pause_mode": "abort"},
        {"rollout_weight_reload_method": "restart"},
        {"rollout_weight_reload_strategy": "serial"},
    ],
)
def test_every_way_to_reload_ends_and_the_next_export_waits_for_it(weights):
    result = run(replaced(small(), weights=weights), num_steps=4)
    assert min(step.freed_at - step.ended_at for step in result.steps) > 0.5
    if weights.get("rollout_weight_reload_method") == "restart":
        assert result.step_s > 60
    else:
        assert result.step_s < 20


def test_serial_reloads_take_longer_than_parallel_ones():
    config = small(planner={"allowed_rollout_tp": [1]})
    restart = {"rollout_weight_reload_method": "restart"}
    parallel = run(replaced(config, weights=restart), num_steps=3)
    one_by_one = {**restart, "rollout_weight_reload_strategy": "serial"}
    serial = run(replaced(config, weights=one_by_one), num_steps=3)
    # Two instances or more, a minute each.
    assert serial.step_s > parallel.step_s + 60


def test_metrics_feedback_works_on_the_simulated_clock():
    config = with_load_metric(small(), "kv_tokens", enable_metrics_feedback=True)
    assert len(run(config, num_steps=3).steps) == 3


def pinned_mix(load_metric):
    """One wide and two narrow instances, on GPUs with little room for cache."""
    config = with_load_metric(
        small(
            planner={"initial_allocation_strategy": "configured"},
            rollout={"rollout_kv_cache_bytes": 400 * 2**20, "rollout_gpus": 4},
        ),
        load_metric,
    )
    return replaced(
        config,
        training={"train_gpus": 4},
        heterogeneous_rollout={"instances": [TpBucket(tp=2, count=1), TpBucket(tp=1, count=2)]},
    )


def test_in_a_mixed_fleet_counting_kv_tokens_preempts_less_than_counting_requests():
    by_requests, by_capacity = run(pinned_mix("requests")), run(pinned_mix("kv_tokens"))
    preempted = [
        sum(use.num_preemptions for use in result.uses) for result in (by_capacity, by_requests)
    ]
    assert preempted[0] < preempted[1] / 2


def test_a_router_that_knows_lengths_beats_one_that_does_not_on_the_same_mix():
    config = with_load_metric(
        grp_config(
            batch_size=192,
            planner={"prior_response_sigma": 1.2},
            rollout={"max_head_offpolicyness": 1.0, "max_concurrent_rollouts": 384},
        ),
        "kv_tokens",
    )
    lengths = GeneratedLengths(
        seed=1, mean_tokens=6554, sigma=1.2, longest=16384, prompt_tokens=256
    )
    demand = lengths.demand(config)
    unknown, known = (
        simulate(mixed(config, demand, lengths_known=known), lengths, num_steps=6, seed=1)
        for known in (False, True)
    )
    assert unknown.rollout == known.rollout
    assert known.tokens_per_gpu_s > unknown.tokens_per_gpu_s


def test_the_planned_split_is_within_a_twentieth_of_the_best_static_one():
    config = small()
    demand = LENGTHS.demand(config)
    best = min(run(config, scenario=scenario).step_s for scenario in static_splits(config, demand))
    assert run(config, scenario=planned(config, demand)).step_s <= 1.05 * best


def test_colocated_runs_are_on_policy_and_pay_for_every_switch():
    config = small()
    scenario = colocated(config, LENGTHS.demand(config))
    result = run(config, scenario=scenario)
    assert scenario.switch_s > 0
    assert result.mean_staleness == 0
    assert result.num_gpus == 8
    for step in result.steps:
        assert step.ended_at - step.started_at > scenario.switch_s


def test_a_comparison_runs_what_it_can_and_says_what_it_cannot():
    # Half of six GPUs has no room for an instance of four.
    config = small(training={"train_gpus": 3, "batch_size": 48}, rollout={"rollout_gpus": 3})
    comparison = compare(config, LENGTHS.demand(config), LENGTHS, num_steps=3, seed=3)
    text = render_comparison(comparison)
    assert "planned" in text
    assert any(reason.startswith("static 3, TP4: ") for reason in comparison.left_out)
    assert "left out: static 3, TP4" in text


def test_a_rendered_run_shows_every_step_beside_the_estimate():
    config = small()
    scenario = configured(config, LENGTHS.demand(config))
    text = render_simulation(run(config, scenario=scenario), scenario.estimate)
    assert "the planner expected a step of" in text
    assert len(text.splitlines()) >= 5 + 5


def test_one_step_is_too_few_to_measure():
    with pytest.raises(ConfigError, match="at least 2 steps"):
        run(small(), num_steps=1)


def test_a_simulation_needs_hardware_and_model():
    config = msgspec.structs.replace(small(), hardware=None)
    with pytest.raises(ConfigError, match="needs hardware"):
        run(config)


def test_requests_that_are_turned_away_come_again():
    config = with_load_metric(
        small(rollout={"max_concurrent_rollouts": 64}),
        "requests",
        max_in_flight_per_instance=4,
        queue_capacity=2,
    )
    result = run(config, num_steps=3)
    assert result.num_refused > 0
    assert len(result.steps) == 3


def test_requests_beyond_the_queue_cap_wait_for_a_place():
    capped = with_load_metric(small(), "requests", max_in_flight_per_instance=4)
    result = run(capped, num_steps=3)
    assert result.num_refused == 0
    assert result.step_s > run(small(), num_steps=3).step_s


def test_without_weight_syncs_nothing_is_reloaded():
    config = replaced(
        small(rollout={"max_head_offpolicyness": float("inf")}),
        weights={"rollout_weight_sync_mode": "none"},
    )
    result = run(config, num_steps=3)
    assert all(step.freed_at == step.ended_at for step in result.steps)
    assert [step.max_staleness for step in result.steps] == [0, 1, 2]
