"""What a run of `Control` is made of in tests: its prompts, its plan, its terms and its answers."""

from typing import Literal

from libra.config.model import ModelConfig
from libra.config.planning import PlannerConfig
from libra.config.run import RunConfig
from libra.config.weights import ReloadMethod, ReloadStrategy, WeightsConfig
from libra.ids import PolicyVersion, PromptId, RunId, SlotId
from libra.planner.plan import InstancePlacement, Plan, TrainPlacement
from libra.pools.change_policy import policy_of
from libra.pools.pool import RolloutPool
from libra.rollouts.accounts import BufferLimits
from libra.rollouts.evaluation import EvaluationTerms
from libra.rollouts.group import AdmittedGroup, PromptRef
from libra.rollouts.trajectory import Trajectory
from libra.wire.instance import VersionSpan
from libra.wire.rank import TrainMetrics
from libra_supervisor.loop import cycle
from libra_supervisor.loop.collection import CollectionTerms
from libra_supervisor.loop.control import Control
from libra_supervisor.loop.evaluator import Evaluator
from libra_supervisor.loop.plan_desk import PlanDesk
from libra_supervisor.loop.publication import Publication, Terms
from libra_supervisor.loop.rollout_desk import RolloutDesk
from libra_supervisor.loop.run_state import Policy

RUN = RunId("run")
PROBE = (1, 2, 3)
METRICS = TrainMetrics(
    loss=0.0,
    grad_norm=1.0,
    entropy=1.0,
    clip_fraction=0.0,
    kl_mismatch=0.0,
    ratio_mean=1.0,
    learning_rate=1e-3,
    num_tokens=8,
    num_optimizer_steps=1,
    num_skipped_steps=0,
    recompute_s=0.1,
    train_s=0.2,
    peak_memory_bytes=0,
)


def probe_logprobs(version: PolicyVersion | None) -> tuple[float, ...]:
    """What every right computation gives; versions differ by more than a run survives."""
    return (-1.0 - (version or 0), -2.0)


class ListCursor:
    """Prompts 0, 1, 2, ... for `epochs` rounds over `num_prompts`; None goes on for ever."""

    def __init__(self, num_prompts: int = 5, epochs: int | None = None) -> None:
        self.num_prompts = num_prompts
        self._epochs = epochs
        self._visit = 0

    def next(self) -> PromptRef | None:
        if self._epochs is not None and self._visit >= self._epochs * self.num_prompts:
            return None
        return self.next_beyond()

    def next_beyond(self) -> PromptRef:
        epoch, row = divmod(self._visit, self.num_prompts)
        self._visit += 1
        return PromptRef(PromptId(f"p{row}"), row, epoch)

    def dump(self) -> bytes:
        return str(self._visit).encode()

    def restore(self, state: bytes) -> None:
        self._visit = int(state)


def still_plans(ids) -> PlanDesk:
    """The desk of a run whose plan is never changed."""
    return PlanDesk(
        plan_of(ids),
        policy_of(PlannerConfig(), num_slots=8),
        config=RunConfig(model=ModelConfig(model_path="m")),
    )


def plan_of(ids) -> Plan:
    """One instance on each slot from 0, the core behind them."""
    return Plan(
        strategy="configured",
        train=TrainPlacement(tp=1, pp=1, cp=1, ep=1, dp=1, slots=(SlotId(len(ids)),)),
        instances=tuple(
            InstancePlacement(instance_id=it, tp=1, slots=(SlotId(k),)) for k, it in enumerate(ids)
        ),
    )


def control_with(  # noqa: PLR0913 - each is a knob of a scenario
    plans: PlanDesk,
    *,
    total_steps: int | None = 4,
    sync_interval: int = 1,
    save_interval: int = 2,
    offpolicyness: float = 1.0,
    max_concurrent: int = 16,
    min_rollout_gpus: int = 1,
    epochs: int | None = None,
    eval_rows: int = 0,
    eval_interval: int = 1,
    reload_method: ReloadMethod = "inplace",
    reload_strategy: ReloadStrategy = "parallel",
    sync_mode: Literal["restart", "nccl"] = "restart",
    num_probes: int = 0,
    collection: CollectionTerms = CollectionTerms(),  # noqa: B008 - frozen
) -> Control:
    servers = plans.started_with.instances
    pool = RolloutPool(
        [(it.instance_id, 1) for it in servers],
        now=0.0,
        node_of={it.instance_id: it.node for it in servers},
    )
    limits = BufferLimits(
        n_samples=2,
        batch_size=4,
        max_concurrent=max_concurrent,
        max_head_offpolicyness=offpolicyness,
        last_step=total_steps,
    )
    terms = Terms(
        run_id=RUN,
        weights=WeightsConfig(
            sync_interval=sync_interval or 1,
            rollout_weight_sync_mode=sync_mode,
            rollout_weight_reload_method=reload_method,
            rollout_weight_reload_strategy=reload_strategy,
        ),
        min_rollout_gpus=min_rollout_gpus,
        probe_token_ids=PROBE,
        probe_tolerance=1e-3,
    )
    return Control(
        cycle_machine=cycle.Cycle(
            cycle.Limits(
                total_steps=total_steps,
                sync_interval=sync_interval,
                save_interval=save_interval,
                eval_interval=eval_interval if eval_rows else None,
            )
        ),
        pool=pool,
        desk=RolloutDesk(limits, ListCursor(epochs=epochs)),
        publication=Publication(terms, pool),
        evaluator=Evaluator(
            EvaluationTerms(
                rows=tuple(range(eval_rows)),
                num_samples=2,
                max_concurrent=3,
                max_attempts=3,
                pass_reward=1.0,
            )
        ),
        policy=Policy(
            min_rollout_gpus=min_rollout_gpus,
            publishes=sync_interval > 0,
            transfers=sync_mode == "nccl",
            num_probes=num_probes,
            collection=collection,
        ),
        plans=plans,
    )


def trajectory(group: AdmittedGroup, index: int, version: PolicyVersion, reward: float):
    return Trajectory(
        trajectory_id=group.trajectory_id(index),
        prompt_id=group.prompt.prompt_id,
        group_id=group.group_id,
        sample_index=index,
        token_ids=(1, 2, 3),
        loss_mask=(0, 1, 1),
        rollout_logprobs=(0.0, -1.0, -1.0),
        version_spans=(VersionSpan(version, 1, 3),),
        num_prompt_tokens=1,
        finish_reason="stop",
        reward=reward,
        instance_ids=(),
    )
