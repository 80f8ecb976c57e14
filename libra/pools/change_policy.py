"""What the configuration allows of a change of plan, and how its strategy is carried out. Pure."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from libra.config.planning import PlannerConfig
from libra.ids import NodeRank, SlotId
from libra.planner.lending import fewest_rollout_gpus, serves_nothing
from libra.planner.matching import matched, slots_of
from libra.planner.plan import InstancePlacement, Plan, Slot, slots_in_words
from libra.pools.change_order import Rules, Stuck, transitions
from libra.pools.ground import Ground, core_slots, server_slots
from libra.pools.transition import Transition, in_words

Strategy: TypeAlias = Literal["diff", "restart_all", "blue_green", "prewarm", "cluster_swap"]


class Refusal(msgspec.Struct, frozen=True):
    """Nothing is touched."""

    reason: str
    transitions: tuple[str, ...] = ()
    """What would have been done, in words, where that is known."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run."""

    is_enabled: bool
    manages_rollout: bool
    """False: the servers are somebody else's, who starts and stops them."""

    strategy: Strategy
    swaps: bool
    """Devices may change sides between the core and rollout."""

    changes_training: bool
    is_plan_only: bool
    """Changes of the training side are written down and not made."""

    drains: bool
    sleeps: bool = False
    """Servers whose slots training gets are kept asleep."""

    min_train_gpus: int
    min_rollout_gpus: int
    min_hybrid_rollout_gpus: int
    """What rollout keeps of its GPUs while there are hybrid replicas; 0: they may borrow all."""

    num_slots: int
    """Devices of this node that the run may use, from slot 0."""

    num_slots_elsewhere: tuple[int, ...] = ()
    """The same of the other nodes, from node 1."""

    timeout_s: float

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Of all nodes."""
        return tuple(
            (NodeRank(node), SlotId(slot))
            for node, count in enumerate((self.num_slots, *self.num_slots_elsewhere))
            for slot in range(count)
        )

    def as_if_made(self) -> "Policy":
        """The same, making what it only writes down, of which nothing else would be left."""
        changes_training = self.changes_training or self.is_plan_only
        return msgspec.structs.replace(self, is_plan_only=False, changes_training=changes_training)

    def rules(self, wanted: Plan) -> Rules:
        return Rules(
            min_rollout_gpus=fewest_rollout_gpus(
                num_replicas=len(wanted.hybrids),
                serves_nothing=serves_nothing(wanted),
                least=self.min_rollout_gpus,
                least_beside_hybrids=self.min_hybrid_rollout_gpus,
            ),
            warms_first=self.strategy == "prewarm",
            serves_first=self.strategy == "blue_green",
            gives_back=not self.drains,
            sleeps=self.sleeps,
        )


def policy_of(
    planner: PlannerConfig, *, num_slots: int, num_slots_elsewhere: tuple[int, ...] = ()
) -> Policy:
    return Policy(
        is_enabled=planner.runtime_dynamic_reconfiguration_enabled,
        manages_rollout=planner.runtime_manage_rollout_processes,
        strategy=planner.runtime_rollout_reconfigure_strategy,
        swaps=planner.runtime_cluster_swap_enabled,
        changes_training=planner.runtime_reconfigure_training,
        is_plan_only=planner.runtime_training_pool_plan_only,
        drains=planner.runtime_drain_before_reconfigure,
        sleeps=planner.runtime_lent_servers == "sleep",
        min_train_gpus=planner.min_train_gpus,
        min_rollout_gpus=planner.min_rollout_gpus,
        min_hybrid_rollout_gpus=planner.elastic_hybrid_min_rollout_gpus,
        num_slots=num_slots,
        num_slots_elsewhere=num_slots_elsewhere,
        timeout_s=planner.runtime_reconfigure_timeout_s,
    )


def matched_by(
    policy: Policy,
    old: Plan,
    wanted: Plan,
    *,
    next_number: int,
    lost: frozenset[Slot] = frozenset(),
    asleep: Sequence[InstancePlacement] = (),
) -> Plan:
    """`wanted` as this strategy carries it out; spare slots are used where it needs them.

    `lost`: slots that nobody may use again; `asleep`: servers that wait for theirs.
    """
    held = {*slots_of(old), *lost}
    spare = [slot for slot in policy.slots if slot not in held]
    return matched(
        old,
        wanted,
        next_number=next_number,
        spare=spare if policy.strategy == "blue_green" else (),
        keeps_instances=policy.strategy != "restart_all",
        asleep=asleep,
    )


Judgement: TypeAlias = tuple[Transition, ...] | Refusal


def judged(policy: Policy, ground: Ground, old: Plan, wanted: Plan) -> Judgement:
    """The transitions of a change without faults, or why there are none.

    From `ground`, on which `old` is in force, to `wanted`, which is matched with it.
    """
    if why := _forbidden(policy, old, wanted) or _below_minima(policy, wanted):
        return Refusal(why)
    if why := devices_missing(policy, wanted):
        return Refusal(why)
    if lost := sorted(set(slots_of(wanted)) & ground.lost):
        return Refusal(f"slot {slots_in_words(lost[:1])} is held by a process that does not end")
    both = {it.instance_id for it in old.instances} & {it.instance_id for it in wanted.instances}
    rules = msgspec.structs.replace(policy.rules(wanted), untouched=frozenset(both))
    listed = transitions(ground, wanted, rules)
    if isinstance(listed, Stuck):
        return Refusal(f"{policy.strategy}: {listed.reason}")
    if policy.is_plan_only and _changes_training(old, wanted):
        words = tuple(map(in_words, listed))
        return Refusal("runtime_training_pool_plan_only: written down, not made", words)
    return listed


def devices_missing(policy: Policy, wanted: Plan) -> str:
    """In words that the plan needs devices that are not there; empty when it does not."""
    used, there = set(slots_of(wanted)), policy.slots
    if used <= set(there):
        return ""
    return f"the plan uses more than the {len(there)} devices there are"


def _forbidden(policy: Policy, old: Plan, wanted: Plan) -> str:
    if not policy.is_enabled:
        return "runtime_dynamic_reconfiguration_enabled is false"
    if not policy.manages_rollout and old.instances != wanted.instances:
        return "the servers are run by somebody else: runtime_manage_rollout_processes is false"
    if _changes_training(old, wanted) and not (policy.changes_training or policy.is_plan_only):
        return "the training side would change, and runtime_reconfigure_training is false"
    if not policy.swaps and (crossing := _crossing(old, wanted)):
        return (
            f"slots {slots_in_words(crossing)} would change sides between the core and rollout, "
            "and runtime_cluster_swap_enabled is false"
        )
    return ""


def _below_minima(policy: Policy, wanted: Plan) -> str:
    least = policy.rules(wanted).min_rollout_gpus
    if wanted.num_rollout_gpus < least:
        return f"rollout would have {wanted.num_rollout_gpus} GPUs, and has to keep {least}"
    if wanted.train.world_size < policy.min_train_gpus:
        return (
            f"training would have {wanted.train.world_size} GPUs, min_train_gpus is "
            f"{policy.min_train_gpus}"
        )
    return ""


def _changes_training(old: Plan, wanted: Plan) -> bool:
    return old.train != wanted.train or old.hybrids != wanted.hybrids


def _crossing(old: Plan, wanted: Plan) -> list[Slot]:
    """Slots that the core takes from rollout or gives to it."""

    def serving(plan: Plan) -> set[Slot]:
        return {slot for it in plan.instances for slot in server_slots(it)}

    taken = core_slots(wanted.train) & serving(old)
    given = core_slots(old.train) & serving(wanted)
    return sorted(taken | given)
