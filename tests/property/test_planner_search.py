"""The search against an enumeration of every split and every layout that it may choose from."""

from math import inf

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.planner.calibration import Calibration
from libra.planner.cost_models import cost_models
from libra.planner.demand import Demand
from libra.planner.layout import best_layout
from libra.planner.pace import RolloutPace, TrainPace, step_seconds
from libra.planner.pricing import train_work
from libra.planner.rollout_cost import workload_of
from libra.planner.search import plan
from libra.planner.train_layout import TrainLayout
from planner_cases import H200_141G, MEASURED_1_8B, grp_config

NUM_GPUS = 8
BATCH = 16
WITHIN = 1.02 * 1.01
"""The planner takes splits within 2 % and layouts within 1 % as equal."""

demands = st.lists(
    st.tuples(st.integers(1, 2000), st.integers(1, 4000)), min_size=BATCH, max_size=BATCH
).map(
    lambda pairs: Demand(
        prompt_tokens=tuple(prompt for prompt, _ in pairs),
        response_tokens=tuple(response for _, response in pairs),
        source="test",
    )
)


def config():
    return grp_config(
        num_gpus=NUM_GPUS,
        arch=MEASURED_1_8B,
        hardware=H200_141G,
        batch_size=BATCH,
        max_new_tokens=4096,
        planner={"allocation_granularity_gpus": 1, "train_pipeline_bubble_ratio_threshold": 1.0},
    )


def every_layout(num_gpus):
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            dp, rest = divmod(num_gpus, tp * pp)
            if rest or not dp or BATCH % dp:
                continue
            for size in (1, 2, 4, 8):
                if size <= BATCH // dp:
                    yield TrainLayout(tp=tp, ep=1, pp=pp, cp=1, dp=dp, micro_batch_size=size)


def fastest_step_s(demand):
    """By enumeration, lengths known in advance."""
    run = config()
    models = cost_models(run, Calibration(hardware="", model=""))
    work, requests = train_work(run, demand), workload_of(demand)
    costs = [models.instance.cost(tp) for tp in (1, 2, 4)]
    best = inf
    for train_gpus in range(1, NUM_GPUS):
        train_s = min(
            (
                models.train.cost(layout, work).total_s
                for layout in every_layout(train_gpus)
                if models.train_memory.budget(layout).fits
            ),
            default=inf,
        )
        rollout = best_layout(costs, requests, num_gpus=NUM_GPUS - train_gpus)
        tps = rollout.tp_degrees
        train = TrainPace(
            train_s=train_s,
            export_s=models.publish.export_s,
            sync_s=models.publish.sync_s(tps),
        )
        pace = RolloutPace(
            one_batch_s=rollout.makespan_s,
            all_batches_s=rollout.makespan_s,
            num_batches=1,
            max_staleness=run.rollout.max_head_offpolicyness,
            pause_s=max(map(models.publish.load_s, tps)),
        )
        best = min(best, step_seconds(train, pace) if train_s < inf else inf)
    return best


@given(demand=demands)
@settings(max_examples=25, deadline=None)
def test_no_split_and_no_layout_is_faster_than_the_choice(demand):
    report = plan(config(), demand=demand, lengths_known=True)
    step_s = report.choice.estimate.step_s
    best_s = fastest_step_s(demand)
    assert best_s * (1 - 1e-9) <= step_s <= best_s * WITHIN


@given(demand=demands, first=st.integers(0, BATCH))
@settings(max_examples=25, deadline=None)
def test_the_plan_does_not_depend_on_the_order_of_the_demand(demand, first):
    pairs = list(zip(demand.prompt_tokens, demand.response_tokens, strict=True))
    turned = pairs[first:] + pairs[:first]
    other = msgspec.structs.replace(
        demand,
        prompt_tokens=tuple(prompt for prompt, _ in turned),
        response_tokens=tuple(response for _, response in turned),
    )
    assert plan(config(), demand=demand) == plan(config(), demand=other)
