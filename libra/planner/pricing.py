"""What the cost model expects of one given plan, without a search."""

from collections.abc import Sequence
from math import inf

import msgspec

from libra.config.run import RunConfig
from libra.planner.cost_models import CostModels
from libra.planner.demand import Demand
from libra.planner.pace import RolloutPace
from libra.planner.plan import TrainPlacement
from libra.planner.report import Estimate
from libra.planner.rollout_cost import workload_of
from libra.planner.rollout_side import PaceTerms, waste_factor
from libra.planner.spread import spread_over
from libra.planner.train_cost import TrainWork
from libra.planner.train_layout import TrainLayout


def estimate_of(
    config: RunConfig,
    demand: Demand,
    models: CostModels,
    *,
    train: TrainLayout,
    tps: Sequence[int],
) -> Estimate:
    """One step of `train` beside instances of these TP degrees, largest first."""
    rollout, one_batch = (
        spread_over(
            [models.instance.cost(tp) for tp in tps],
            workload_of(msgspec.structs.replace(demand, num_batches=num_batches)),
            by_capacity=config.heterogeneous_rollout.scheduling.load_metric == "kv_tokens",
        )
        for num_batches in (demand.num_batches, 1)
    )
    terms = pace_terms(config, demand, models)
    return Estimate(
        train=models.train.cost(train, train_work(config, demand)),
        train_budget=models.train_memory.budget(train),
        rollout=rollout,
        num_batches=demand.num_batches,
        export_s=terms.export_s,
        sync_s=terms.sync_s_of(tps),
        pace=RolloutPace(
            one_batch_s=one_batch.makespan_s,
            all_batches_s=rollout.makespan_s,
            num_batches=terms.num_batches,
            max_staleness=terms.max_staleness,
            waste_factor=waste_factor(terms.max_staleness),
            pause_s=terms.pause_s_of(tps),
        ),
    )


def layout_of(train: TrainPlacement, *, micro_batch_size: int) -> TrainLayout:
    """The core's layout; `micro_batch_size` where the plan leaves the configured one."""
    return TrainLayout(
        tp=train.tp,
        ep=train.ep,
        pp=train.pp,
        cp=train.cp,
        dp=train.dp,
        micro_batch_size=train.micro_batch_size or micro_batch_size,
    )


def train_work(config: RunConfig, demand: Demand) -> TrainWork:
    training = config.training
    return TrainWork(demand, mini_batch_size=training.mini_batch_size or training.batch_size)


def pace_terms(config: RunConfig, demand: Demand, models: CostModels) -> PaceTerms:
    """How staleness and reloads bind rollout to training."""
    weights, publish = config.weights, models.publish
    # Between two syncs the engines' version falls behind; on average by half of that.
    behind = (weights.sync_interval - 1) / 2
    publishes = weights.rollout_weight_sync_mode != "none"
    return PaceTerms(
        num_batches=demand.num_batches,
        max_staleness=config.rollout.max_head_offpolicyness - behind if publishes else inf,
        export_s=publish.step_export_s(),
        pause_s_of=lambda tps: max(map(publish.step_pause_s, tps), default=0.0),
        sync_s_of=publish.step_sync_s,
    )
