from math import inf
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.ids import PolicyVersion, PromptId, TrajectoryId
from libra.planner.rollout_cost import InstanceCost, Workload, block_seconds
from libra.simulate.engine import Engine, EngineRequest

UNFITTED_SEEDS = (301, 302, 303, 304)
"""None of the planner's constants was fitted to these."""


def cost(**changes):
    values = {
        "tp": 1,
        "step_s": 0.01,
        "weights_s": 0.02,
        "expert_s": 0.0,
        "num_expert_sequences": 0,
        "compute_s": 0.001,
        "num_free_sequences": 20,
        "token_s": 0.0,
        "cached_token_s": 1e-6,
        "prompt_token_s": 1e-5,
        "prompt_square_s": 0.0,
        "api_token_s": 0.0,
        "capacity_tokens": 100_000,
        "max_sequences": 256,
    }
    return InstanceCost(**{**values, **changes})


def request(name, *, prompt=100, response=1000, prompt_id=None):
    return EngineRequest(
        trajectory_id=TrajectoryId(name),
        prompt_id=PromptId(prompt_id or name),
        prompt_tokens=prompt,
        response_tokens=response,
    )


def run(engine, *, until=inf):
    """Finished requests with their instants, event by event."""
    done, now = [], 0.0
    while (due := engine.next_due_at()) <= until and due < inf:
        now = due
        done += [(now, finished.trajectory_id) for finished in engine.advance(now)]
    return done


def test_one_request_takes_its_prefill_and_its_steps():
    engine = Engine(cost())
    engine.submit(request("a"))
    ((ended_at, _),) = run(engine)
    steps = 1000
    reading = 1e-6 * (steps * 100 + steps**2 / 2)
    assert ended_at == pytest.approx(100 * 1e-5 + steps * 0.03 + reading)


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    prompt=st.integers(1, 500),
)
@settings(max_examples=60, deadline=None)
def test_requests_that_start_together_take_what_the_planner_says(lengths, prompt):
    roomy = cost(capacity_tokens=10**9)
    engine = Engine(roomy)
    for index, length in enumerate(lengths):
        engine.submit(request(f"r{index}", prompt=prompt, response=length))
    ended_at = run(engine)[-1][0]
    work = Workload([(prompt, length) for length in lengths])
    assert ended_at == pytest.approx(block_seconds(roomy, work, 0, len(work)), rel=0.01)


def test_a_full_cache_takes_at_least_what_the_planner_says_and_not_much_more():
    tight = cost(capacity_tokens=5000)
    lengths = [200 + 37 * k % 900 for k in range(60)]
    engine = Engine(tight)
    for index, length in enumerate(lengths):
        engine.submit(request(f"r{index}", prompt=50, response=length))
    ended_at = run(engine)[-1][0]
    work = Workload([(50, length) for length in lengths])
    assert 0.9 < ended_at / block_seconds(tight, work, 0, len(work)) < 1.6
    assert engine.counts().num_preemptions > 0


def test_instances_with_a_queue_take_what_the_closed_form_says_within_bounds():
    over = [
        crowded_over_estimate(seed, sigma, crowding)
        for seed in UNFITTED_SEEDS
        for sigma in (0.5, 0.8, 1.2)
        for crowding in (2, 4, 8)
    ]
    assert min(over) > 0.9
    assert max(over) < 1.5
    assert mean(over) == pytest.approx(1.1, abs=0.05)


def crowded_over_estimate(seed, sigma, crowding):
    """Simulated over estimated time of requests that need the cache `crowding` times over."""
    drawn = np.random.default_rng(seed).standard_normal(120)
    responses = np.exp(6 - sigma**2 / 2 + sigma * drawn).round().clip(1, 4000)
    lengths = [int(response) for response in responses]
    needed = sum(100 + length / 2 for length in lengths)
    # Steps alone take time.
    tight = cost(
        capacity_tokens=int(max(needed / crowding, 4200)), cached_token_s=0.0, compute_s=0.0
    )
    engine = Engine(tight)
    for index, length in enumerate(lengths):
        engine.submit(request(f"r{index}", prompt=100, response=length))
    work = Workload([(100, length) for length in lengths])
    return run(engine)[-1][0] / block_seconds(tight, work, 0, len(work))


def test_preempted_requests_finish_with_all_their_tokens():
    engine = Engine(cost(capacity_tokens=1500))
    for name in ("a", "b"):
        engine.submit(request(name, prompt=10, response=1000))
    done = run(engine)
    assert [name for _, name in done] == ["a", "b"]
    assert engine.counts().num_preemptions == 1
    assert engine.counts().num_running == engine.counts().num_waiting == 0
    assert engine.counts().kv_use_fraction == 0


def test_a_lone_request_larger_than_the_cache_still_ends():
    engine = Engine(cost(capacity_tokens=500))
    engine.submit(request("a", response=2000))
    assert len(run(engine)) == 1


def test_no_more_sequences_run_than_vllm_is_told():
    engine = Engine(cost(max_sequences=2))
    for name in "abc":
        engine.submit(request(name))
    assert engine.counts().num_running == 2
    assert engine.counts().num_waiting == 1


def test_a_sibling_on_the_same_instance_does_not_prefill_its_prompt_again():
    def ended_at(second_prompt):
        engine = Engine(cost(prompt_token_s=0.01))
        engine.submit(request("a", prompt_id="p"))
        engine.submit(request("b", prompt_id=second_prompt))
        return run(engine)[-1][0]

    assert ended_at("q") - ended_at("p") == pytest.approx(100 * 0.01)


def test_a_frozen_engine_keeps_requests_and_goes_on_where_it_was():
    engine = Engine(cost(cached_token_s=0.0))
    engine.submit(request("a"))
    engine.advance(5.0)
    engine.freeze()
    assert engine.next_due_at() == inf
    engine.advance(100.0)
    engine.thaw()
    ((ended_at, _),) = run(engine)
    assert ended_at == pytest.approx(95.0 + 100 * 1e-5 + 1000 * 0.03)


def test_evicted_requests_go_on_after_their_last_token_or_begin_anew():
    def ended_at(*, keeps_tokens):
        engine = Engine(cost(cached_token_s=0.0, prompt_token_s=0.0))
        engine.submit(request("a"))
        engine.advance(15.0)
        engine.evict(keeps_tokens=keeps_tokens)
        engine.thaw()
        return run(engine)[0][0]

    assert ended_at(keeps_tokens=True) == pytest.approx(30.0)
    assert ended_at(keeps_tokens=False) == pytest.approx(45.0)


def test_a_closed_engine_ends_what_runs_and_admits_nothing():
    engine = Engine(cost())
    engine.submit(request("a"))
    engine.close()
    engine.submit(request("b"))
    assert [name for _, name in run(engine)] == ["a"]
    assert engine.is_empty
    engine.thaw()
    assert engine.counts().num_running == 1


def test_the_policy_of_the_first_token_is_that_of_the_start_not_of_the_queue():
    engine = Engine(cost(max_sequences=1))
    first, second = request("a"), request("b")
    engine.submit(first)
    engine.submit(second)
    engine.policy_version = PolicyVersion(3)
    run(engine)
    assert (first.oldest_version, second.oldest_version) == (0, 3)


def test_a_slow_api_process_bounds_tokens_per_second():
    engine = Engine(cost(api_token_s=0.01, cached_token_s=0.0))
    for index in range(50):
        engine.submit(request(f"r{index}", response=100))
    assert run(engine)[-1][0] == pytest.approx(50 * 100 * 0.01, rel=0.02)
