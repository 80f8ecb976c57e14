"""The planner's step against the simulator's, on seeds that none of its constants was fitted to."""

from statistics import mean

import pytest

from libra.simulate.lengths import prior_lengths
from libra.simulate.run import simulate
from libra.simulate.scenarios import static_split
from planner_cases import H200_141G, MEASURED_1_8B, grp_config

SEEDS = (201, 202, 203)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("sigma", [0.8, 1.2])
def test_a_step_takes_what_was_estimated_within_fifteen_percent(staleness, sigma):
    config = grp_config(
        num_gpus=8,
        arch=MEASURED_1_8B,
        hardware=H200_141G,
        batch_size=64,
        max_new_tokens=2048,
        training={"mini_batch_size": 32},
        planner={
            "allocation_granularity_gpus": 1,
            "prior_response_sigma": sigma,
            "prior_response_mean_tokens": 819,
        },
        rollout={
            "max_head_offpolicyness": float(staleness),
            "max_concurrent_rollouts": 64 * (staleness + 1),
        },
    )

    def over_estimate(seed):
        lengths = prior_lengths(config, seed=seed, growth_per_step=0.0)
        scenario = static_split(config, lengths.demand(config), train_gpus=4, tp=1)
        result = simulate(scenario, lengths, num_steps=8, seed=seed)
        assert staleness or not result.num_stale_dropped
        return result.step_s / scenario.estimate.step_s

    assert mean(map(over_estimate, SEEDS)) == pytest.approx(1, abs=0.15)
