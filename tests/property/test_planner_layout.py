from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.errors import InfeasiblePlanError
from libra.planner.layout import best_layout, layout_within
from libra.planner.rollout_cost import InstanceCost, Workload, block_seconds
from libra.planner.spread import spread_over, spreads

seconds = st.floats(0, 10, allow_subnormal=False)


@st.composite
def instance_costs(draw, tp):
    return InstanceCost(
        tp=tp,
        step_s=draw(seconds),
        weights_s=draw(seconds),
        expert_s=draw(seconds),
        num_expert_sequences=draw(st.integers(0, 3)),
        compute_s=draw(seconds),
        num_free_sequences=draw(st.integers(0, 3)),
        token_s=draw(seconds),
        cached_token_s=draw(seconds),
        prompt_token_s=draw(seconds),
        prompt_square_s=draw(seconds),
        api_token_s=draw(seconds),
        capacity_tokens=draw(st.integers(1, 60)),
        max_sequences=draw(st.integers(1, 5)),
    )


@st.composite
def cost_sets(draw):
    degrees = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True))
    return [draw(instance_costs(tp)) for tp in degrees]


workloads = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=7).map(
    Workload
)


def brute_force_makespan(costs, work, num_gpus):
    """Every way to cut the sorted requests into contiguous blocks on instances in any order."""
    best = None

    def extend(begin, gpus_left, makespan):
        nonlocal best
        if begin == len(work):
            best = makespan if best is None else min(best, makespan)
            return
        for cost, end in product(costs, range(begin + 1, len(work) + 1)):
            if cost.tp <= gpus_left:
                seconds = block_seconds(cost, work, begin, end)
                extend(end, gpus_left - cost.tp, max(makespan, seconds))

    extend(0, num_gpus, 0.0)
    return best


@settings(deadline=None)  # enumeration is slow on a busy machine
@given(costs=cost_sets(), work=workloads, num_gpus=st.integers(1, 6))
def test_the_layout_is_as_fast_as_the_best_of_all(costs, work, num_gpus):
    expected = brute_force_makespan(costs, work, num_gpus)
    if expected is None:
        with pytest.raises(InfeasiblePlanError):
            best_layout(costs, work, num_gpus=num_gpus)
    else:
        assert best_layout(costs, work, num_gpus=num_gpus).makespan_s == expected


@given(costs=cost_sets(), work=workloads, num_gpus=st.integers(4, 9))
def test_every_request_is_in_exactly_one_block_and_the_gpus_suffice(costs, work, num_gpus):
    layout = best_layout(costs, work, num_gpus=num_gpus)
    cost_of = {cost.tp: cost for cost in costs}
    begin = 0
    for block in layout.blocks:
        end = begin + block.num_requests
        assert block.seconds == block_seconds(cost_of[block.tp], work, begin, end)
        begin = end
    assert begin == len(work)
    assert layout.num_gpus <= num_gpus


@given(costs=cost_sets(), work=workloads, num_gpus=st.integers(4, 9))
def test_more_gpus_never_make_the_layout_slower(costs, work, num_gpus):
    few = best_layout(costs, work, num_gpus=num_gpus)
    many = best_layout(costs, work, num_gpus=num_gpus + 1)
    assert many.makespan_s <= few.makespan_s


@given(costs=cost_sets(), work=workloads, num_gpus=st.integers(4, 9))
def test_a_tolerance_is_kept(costs, work, num_gpus):
    exact = best_layout(costs, work, num_gpus=num_gpus).makespan_s
    rough = best_layout(costs, work, num_gpus=num_gpus, tolerance=0.1).makespan_s
    assert exact <= rough <= exact / 0.9 * (1 + 1e-9)


@given(costs=cost_sets(), work=workloads, num_gpus=st.integers(4, 9), limit_s=st.floats(0, 1e5))
def test_a_layout_within_a_limit_keeps_it_and_uses_as_few_gpus_as_any(
    costs, work, num_gpus, limit_s
):
    layout = layout_within(costs, work, num_gpus=num_gpus, limit_s=limit_s)
    if layout is None:
        assert best_layout(costs, work, num_gpus=num_gpus).makespan_s > limit_s
    else:
        assert layout.makespan_s <= limit_s
        fewer = layout_within(costs, work, num_gpus=layout.num_gpus - 1, limit_s=limit_s)
        assert fewer is None


@given(cost=instance_costs(2), work=workloads, data=st.data())
def test_a_part_of_a_block_never_costs_more_than_the_block(cost, work, data):
    begin = data.draw(st.integers(0, len(work)))
    end = data.draw(st.integers(begin, len(work)))
    inner_begin = data.draw(st.integers(begin, end))
    inner_end = data.draw(st.integers(inner_begin, end))
    inner = block_seconds(cost, work, inner_begin, inner_end)
    assert inner <= block_seconds(cost, work, begin, end)


def best_spread(costs, work, num_gpus, *, by_capacity):
    """The fastest way to use the GPUs of nodes of four; None when no degree fits."""
    layouts = (
        spread_over(instances, work, by_capacity=by_capacity)
        for instances in spreads(costs, num_gpus, 4)
    )
    return min(layouts, key=lambda layout: layout.makespan_s, default=None)


# Samples are by response length: of a few requests, a smaller one may have the one long prompt.
alike_prompts = st.tuples(
    st.integers(1, 20), st.lists(st.integers(1, 30), min_size=1, max_size=7)
).map(lambda drawn: Workload([(drawn[0], response) for response in drawn[1]]))


@given(costs=cost_sets(), work=alike_prompts, num_gpus=st.integers(1, 9), by_capacity=st.booleans())
def test_more_gpus_never_make_a_spread_slower(costs, work, num_gpus, by_capacity):
    few = best_spread(costs, work, num_gpus, by_capacity=by_capacity)
    many = best_spread(costs, work, num_gpus + 1, by_capacity=by_capacity)
    if few is not None:
        assert many.makespan_s <= few.makespan_s


@given(costs=cost_sets(), work=workloads, num_gpus=st.integers(4, 9), by_capacity=st.booleans())
def test_a_spread_keeps_within_its_gpus_and_nobody_takes_more_than_all(
    costs, work, num_gpus, by_capacity
):
    layout = best_spread(costs, work, num_gpus, by_capacity=by_capacity)
    assert layout.num_gpus <= num_gpus
    assert all(1 <= block.num_requests <= len(work) for block in layout.blocks)
    assert layout.num_requests >= len(work)


@given(work=workloads, data=st.data())
def test_a_sample_begins_with_the_longest_request_and_has_as_many_as_asked_for(work, data):
    num_requests = data.draw(st.integers(1, len(work)))
    sample = work.sample(num_requests)
    assert sample.lengths[0] == work.lengths[0]
    assert len(sample) == num_requests
    assert sample.lengths == sorted(sample.lengths, reverse=True)
