"""A configuration with a plan written into it: what every later reader of counts and sizes sees."""

from collections import Counter

from msgspec.structs import replace

from libra.config.rollout import TpBucket
from libra.config.run import RunConfig
from libra.errors import ConfigError
from libra.planner.lending import serves_nothing
from libra.planner.matching import slots_of
from libra.planner.plan import Plan


def planned_config(config: RunConfig, plan: Plan) -> RunConfig:
    """`config` as if `plan`'s split had been configured.

    GPU counts, parallel sizes, micro-batch and instances are the plan's, the strategy becomes
    `configured`; everything else stays.
    """
    train = plan.train
    return replace(
        _with_instances(config, plan),
        training=replace(
            config.training,
            train_gpus=train.world_size,
            train_tp_size=train.tp,
            train_pp_size=train.pp,
            train_cp_size=train.cp,
            train_ep_size=train.ep,
            micro_batch_size=train.micro_batch_size or config.training.micro_batch_size,
        ),
        global_resource_planner=replace(
            config.global_resource_planner, initial_allocation_strategy="configured"
        ),
    )


def _with_instances(config: RunConfig, plan: Plan) -> RunConfig:
    if not config.global_resource_planner.runtime_manage_rollout_processes:
        return config  # servers of others are as they are
    if serves_nothing(plan):
        return _with_lent_gpus(config, plan.num_hybrid_gpus)
    degrees = Counter(instance.tp for instance in plan.instances)
    buckets = [TpBucket(tp=tp, count=degrees[tp]) for tp in sorted(degrees, reverse=True)]
    return replace(
        config,
        rollout=replace(config.rollout, rollout_gpus=plan.num_rollout_gpus),
        heterogeneous_rollout=replace(config.heterogeneous_rollout, instances=buckets),
    )


def _with_lent_gpus(config: RunConfig, num_gpus: int) -> RunConfig:
    """What replicas have borrowed is rollout's all the same, and every run has rollout."""
    if config.rollout.rollout_gpus == num_gpus:
        return config
    return replace(
        config,
        rollout=replace(config.rollout, rollout_gpus=num_gpus),
        heterogeneous_rollout=replace(config.heterogeneous_rollout, instances=[]),
    )


def pinned_config(config: RunConfig, old: RunConfig, *, changed: Plan | None = None) -> RunConfig:
    """`config` for a run that goes on: with `grp` it keeps the layout that `old` was run with.

    What was learned since might plan another one, and nobody asked for a change. Raises ConfigError
    when the budget of GPUs has changed; or, of a run whose plan has `changed` meanwhile and may use
    less than it had or lend some, when it is too small for that.
    """
    if config.global_resource_planner.initial_allocation_strategy != "grp":
        return config
    budget, had = _num_gpus(config), _num_gpus(old)
    if changed is not None:
        had = max(budget, len(slots_of(changed)))
    if budget != had:
        raise ConfigError(
            f"train_gpus + rollout_gpus is {budget} and was {had}, but --resume cannot change the "
            "planner's budget: set it back, or start a new run"
        )
    sizes = (
        *("train_gpus", "train_tp_size", "train_pp_size", "train_cp_size", "train_ep_size"),
        "micro_batch_size",
    )
    return replace(
        config,
        training=replace(config.training, **{name: getattr(old.training, name) for name in sizes}),
        rollout=replace(config.rollout, rollout_gpus=old.rollout.rollout_gpus),
        heterogeneous_rollout=replace(
            config.heterogeneous_rollout, instances=old.heterogeneous_rollout.instances
        ),
        global_resource_planner=replace(
            config.global_resource_planner, initial_allocation_strategy="configured"
        ),
    )


def _num_gpus(config: RunConfig) -> int:
    return config.training.train_gpus + config.rollout.rollout_gpus
