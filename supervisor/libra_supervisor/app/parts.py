"""Builds the control state of a run from its configuration."""

from functools import partial

from libra import clock
from libra.config.planning import PlannerConfig
from libra.config.run import RunConfig
from libra.hybrid.proof import new_key
from libra.ids import NodeRank, RunId
from libra.models.architecture import architecture_of
from libra.models.kv_capacity import kv_capacity_tokens
from libra.planner.cost_models import engine_memory
from libra.planner.plan import Plan, TrainPlacement
from libra.planner.without_nodes import Layouts, Terms, fastest, smaller_dp
from libra.pools.change_policy import policy_of
from libra.pools.pool import RolloutPool
from libra.rollouts.accounts import LEASE_S, BufferLimits
from libra.rollouts.batch import BatchShape
from libra.rollouts.evaluation import EvaluationTerms
from libra.weights.judge import probe_tolerance_of
from libra_supervisor.app.launch import Launch, gpus_per_node
from libra_supervisor.app.prompts import Prompts
from libra_supervisor.doctor.checks import BYTES_OF_DTYPE
from libra_supervisor.instances.vllm import rollout_dtype
from libra_supervisor.loop.collection import CollectionTerms
from libra_supervisor.loop.control import Control
from libra_supervisor.loop.cycle import Cycle, Limits
from libra_supervisor.loop.evaluator import Evaluator
from libra_supervisor.loop.hybrid_desk import HybridDesk, HybridTerms
from libra_supervisor.loop.node_desk import NodeDesk, NodePolicy
from libra_supervisor.loop.plan_desk import PlanDesk
from libra_supervisor.loop.presence import Presence
from libra_supervisor.loop.publication import Publication
from libra_supervisor.loop.publication import Terms as PublicationTerms
from libra_supervisor.loop.rollout_desk import RolloutDesk
from libra_supervisor.loop.run_state import Policy


def control_of(launch: Launch, prompts: Prompts, run_id: RunId) -> Control:
    """Every machine in its first state. Call it inside the event loop: it reads the clock."""
    now, config, plan = clock.now(), launch.config, launch.plan
    hybrids = hybrid_desk_of(launch, run_id)
    plans = plan_desk_of(launch, hybrids)
    pool = RolloutPool(
        [(i.instance_id, i.tp) for i in plan.instances],
        now=now,
        node_of={i.instance_id: i.node for i in plan.instances},
    )
    min_rollout_gpus = config.global_resource_planner.min_rollout_gpus
    publishes = config.weights.rollout_weight_sync_mode != "none"
    publication = Publication(
        PublicationTerms(
            run_id=run_id,
            weights=config.weights,
            min_rollout_gpus=min_rollout_gpus,
            probe_token_ids=prompts.probe_token_ids,
            probe_tolerance=probe_tolerance(config),
            rank_heartbeat_timeout_s=config.supervision.rank_heartbeat_timeout_s,
        ),
        pool,
    )
    return Control(
        cycle_machine=Cycle(_limits(config, publishes=publishes, now=now)),
        pool=pool,
        desk=RolloutDesk(buffer_limits(config), prompts.cursor),
        publication=publication,
        evaluator=Evaluator(_evaluation_terms(config, prompts)),
        plans=plans,
        hybrids=hybrids,
        nodes=node_desk_of(launch, plans, now=now),
        policy=Policy(
            min_rollout_gpus=min_rollout_gpus,
            publishes=publishes,
            transfers=config.weights.rollout_weight_sync_mode == "nccl",
            collection=_collection_terms(config),
            num_probes=plan.train.world_size
            if config.global_resource_planner.memory_budget_dry_run_enabled
            else 0,
        ),
    )


def hybrid_desk_of(launch: Launch, run_id: RunId) -> HybridDesk | None:
    """None where no replica can ever be: then a plan with one is refused."""
    config, train = launch.config, launch.plan.train
    planner = config.global_resource_planner
    changes_training = (
        planner.runtime_dynamic_reconfiguration_enabled and planner.runtime_reconfigure_training
    )
    # Without lanes of their own, more replicas are another layout of the gang.
    has_lanes = planner.decouple_communication_domains
    if not (changes_training and has_lanes and config.training.train_backend == "megatron_core"):
        return None
    grid = train.tp * train.pp * train.cp
    size = planner.elastic_hybrid_replica_size_gpus or grid * train.ep
    return HybridDesk(
        HybridTerms(
            run_id=run_id,
            key=new_key(),
            directory=str(launch.directory.hybrid),
            core=train,
            hosts=() if launch.site is None else launch.site.hosts,
            replica_size=size,
            replica_data=size // grid,
            join_timeout_s=planner.runtime_reconfigure_timeout_s,
            shape=batch_shape(config, launch.plan),
        )
    )


def plan_desk_of(launch: Launch, hybrids: HybridDesk | None) -> PlanDesk:
    """Every device of the machine that the run may use counts as a slot."""
    planner, site = launch.config.global_resource_planner, launch.site
    followers = () if site is None else tuple(map(NodeRank, range(1, site.num_nodes)))
    return PlanDesk(
        launch.plan,
        policy_of(
            planner,
            num_slots=len(launch.devices),
            num_slots_elsewhere=(gpus_per_node(launch) or 0,) * len(followers),
        ),
        config=launch.given,
        memory=launch.memory,
        hybrids=hybrids,
        presence=Presence(followers),
    )


def node_desk_of(launch: Launch, plans: PlanDesk, *, now: float) -> NodeDesk | None:
    """None where the run waits for a node that it lost, or has no other."""
    cluster, site = launch.config.cluster, launch.site
    if site is None or cluster.node_loss_policy == "wait":
        return None
    config = launch.given
    planner = config.global_resource_planner
    return NodeDesk(
        NodePolicy(
            home=launch.plan,
            terms=Terms(
                min_rollout_gpus=planner.min_rollout_gpus,
                layouts=partial(_layouts, launch),
                why_not=lambda plan: plans.why_not(plan) or too_small(plan, planner),
                crosses_nodes=planner.allow_cross_node_tp,
            ),
            followers=tuple(NodeRank(rank) for rank in range(1, site.num_nodes)),
            patience_s=cluster.node_loss_patience_s,
            first_patience_s=config.supervision.start_timeout_s,
            retry_s=planner.runtime_replan_cooldown_s,
            micro_batch_size=config.training.micro_batch_size,
        ),
        now=now,
    )


def _layouts(launch: Launch, train: TrainPlacement) -> Layouts:
    """The planner's, where the layout is the planner's to choose; else that of `train`, cut."""
    config = launch.given
    asked_for = launch.loaded.config.global_resource_planner.initial_allocation_strategy
    if asked_for == "grp" and launch.book is not None:
        return fastest(config, train, launch.book)
    return smaller_dp(train, micro_batch_size=config.training.micro_batch_size)


def too_small(plan: Plan, planner: PlannerConfig) -> str:
    """In words that the plan's core is below the configured minimum; empty when it is not."""
    if plan.train.world_size >= planner.min_train_gpus:
        return ""
    return f"min_train_gpus is {planner.min_train_gpus}"


def probe_tolerance(config: RunConfig) -> float:
    """Of the coarser of the two sides' dtypes."""
    return max(
        probe_tolerance_of(config.training.train_dtype), probe_tolerance_of(rollout_dtype(config))
    )


def batch_shape(config: RunConfig, plan: Plan) -> BatchShape:
    training = config.training
    return BatchShape(
        dp_size=plan.train.dp,
        mini_batch_size=training.mini_batch_size or training.batch_size,
        mask_truncated=config.algorithm.mask_truncated,
    )


def kv_capacity_by_tp(config: RunConfig, plan: Plan) -> dict[int, int]:
    """Estimated KV capacity in tokens per TP degree, until the servers have measured theirs.

    Empty without a description of hardware and model: then only what servers tell counts.
    """
    if config.hardware is None or config.model_arch is None:
        return {}
    memory = engine_memory(config, config.hardware)
    num_bytes = BYTES_OF_DTYPE[rollout_dtype(config)]
    return {
        tp: kv_capacity_tokens(
            architecture_of(config.model_arch),
            memory,
            tp=tp,
            weight_dtype_bytes=num_bytes,
            kv_dtype_bytes=num_bytes,
        )
        for tp in {instance.tp for instance in plan.instances}
    }


def _collection_terms(config: RunConfig) -> CollectionTerms:
    planner = config.global_resource_planner
    return CollectionTerms(
        timeout_s=planner.runtime_batch_collection_timeout_s,
        max_retries=planner.runtime_batch_collection_max_retries,
        allows_partial=planner.runtime_batch_collection_allow_partial,
        micro_batch_size=config.training.micro_batch_size,
    )


def _limits(config: RunConfig, *, publishes: bool, now: float) -> Limits:
    max_run_s = config.control.max_run_s
    return Limits(
        total_steps=config.control.total_steps,
        sync_interval=config.weights.sync_interval if publishes else 0,
        save_interval=config.control.save_interval,
        eval_interval=config.evaluation.eval_interval if config.data.eval_data else None,
        deadline=None if max_run_s is None else now + max_run_s,
    )


def _evaluation_terms(config: RunConfig, prompts: Prompts) -> EvaluationTerms | None:
    if prompts.evaluated is None:
        return None
    return EvaluationTerms(
        rows=tuple(int(row) for row in prompts.evaluated.rows),
        num_samples=config.evaluation.eval_samples,
        max_concurrent=config.rollout.max_concurrent_rollouts,
        max_attempts=config.data.max_group_attempts,
        pass_reward=config.evaluation.eval_pass_reward,
    )


def buffer_limits(config: RunConfig) -> BufferLimits:
    queue_deadline_s = config.heterogeneous_rollout.scheduling.queue_deadline_s
    return BufferLimits(
        n_samples=config.algorithm.n_samples,
        batch_size=config.training.batch_size,
        max_concurrent=config.rollout.max_concurrent_rollouts,
        max_head_offpolicyness=config.rollout.max_head_offpolicyness,
        max_group_attempts=config.data.max_group_attempts,
        lease_s=LEASE_S + max(queue_deadline_s, config.data.reward_timeout_s),
        max_flat_drops=config.algorithm.max_flat_drops,
        last_step=config.control.total_steps,
    )
