"""The plan in force, and the change that is under way, if any. Pure."""

from typing import Final, Protocol, get_args

import msgspec

from libra.config.rules import check_rules
from libra.config.run import RunConfig
from libra.errors import InvariantError
from libra.ids import InstanceId, NodeRank, ReplicaId
from libra.planner.applied import planned_config
from libra.planner.lending import serves_nothing
from libra.planner.matching import next_number_after, slots_of
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, Slot, with_hybrids_in_core
from libra.pools.change_policy import Judgement, Policy, Refusal, judged, matched_by
from libra.pools.ground import (
    Ground,
    Hybrid,
    Server,
    Stage,
    core_slots,
    hybrid_slots,
    plan_on,
    server_slots,
)
from libra.pools.member import MemberState
from libra.pools.pool import RolloutPool
from libra.pools.reconfiguration import Order, Reconfiguration
from libra.pools.transition import PHASE_OF
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.plan_memory import PlanMemory
from libra_supervisor.loop.presence import Presence
from libra_supervisor.loop.stage_clock import StageClock
from libra_supervisor.records.reconfiguration import Outcome, ReconfigurationRecord

STALLED: Final = "stalled"


class HybridPort(Protocol):
    """Attaches and detaches hybrid replicas; HybridJoined, Left and Lost say how it went."""

    def warm(self, placement: HybridPlacement) -> tuple[Command, ...]:
        """Start one as far as it comes without its devices; HybridWarmed says when it has."""
        ...

    def attach(self, placement: HybridPlacement) -> tuple[Command, ...]: ...

    def detach(self, replica_id: ReplicaId) -> tuple[Command, ...]: ...

    @property
    def present(self) -> tuple[HybridPlacement, ...]:
        """Of all replicas that hold devices, those that were told to leave included."""


class Loss(msgspec.Struct, frozen=True):
    """A replica of the plan in force that is gone, unasked."""

    replica_id: ReplicaId
    why: str


class PlanDesk:
    """At most one change at a time."""

    def __init__(  # noqa: PLR0915 - fields, with what each means
        self,
        plan: Plan,
        policy: Policy,
        *,
        config: RunConfig,
        memory: PlanMemory | None = None,
        hybrids: HybridPort | None = None,
        presence: Presence | None = None,
    ) -> None:
        """`config` is the run's, whichever plan is written into it.

        `memory` is what an earlier supervisor of the run left, whose plan `plan` is then.
        """
        self.plan = plan
        """In force; while a change is under way, the one before it."""

        self.policy = policy
        self.hybrids = hybrids
        self.change: Reconfiguration | None = None
        self.home: Plan | None = None
        """With every node there, once the loss of one has changed the plan."""

        self.presence = presence or Presence()
        self.lent_from: Plan | None = None
        """Before replicas borrowed the last server; None while the plan in force has one."""

        self.stages = StageClock()
        """Of the change under way."""

        self.interrupted: Order | None = None
        """A change that an earlier supervisor did not end."""

        self.started_with = plan
        self._config = config
        self.num_by_outcome: dict[str, int] = dict.fromkeys(get_args(Outcome), 0)
        """Of changes, refused ones included, since this supervisor began."""

        self.seconds_by_phase: dict[str, float] = dict.fromkeys((*PHASE_OF.values(), STALLED), 0.0)
        """What they took; `stalled` is how long the trainer stood still for them."""

        self._next_number = next_number_after(plan)
        self._decision_id = 0
        self.lost: frozenset[Slot] = frozenset()
        self.asleep: tuple[InstancePlacement, ...] = ()
        """Servers outside of the plan in force that wait for their slots."""

        self.losses: tuple[Loss, ...] = ()
        """Outside of a change; nobody has looked yet at what to make of them."""

        self._freed: frozenset[Slot] = frozenset()
        """What lost replicas had."""

        self._kept = memory
        if memory is not None:
            self._remember(memory)

    def _remember(self, memory: PlanMemory) -> None:
        self._next_number = max(memory.next_number, self._next_number)
        self.lost = frozenset((NodeRank(0), slot) for slot in memory.lost_slots)
        self.lost |= frozenset(memory.lost_elsewhere)
        self._decision_id = memory.decision_id
        if memory.lent_from is not None:
            return  # what was borrowed ended with the supervisor before, and so did the loan
        self.plan = msgspec.structs.replace(memory.in_force, hybrids=())
        self.interrupted = memory.order or self._order_of_replicas(memory.plan)

    @property
    def unusable(self) -> frozenset[Slot]:
        """Slots that no plan may use now: lost ones, and those of nodes that are not there."""
        return self.lost | self.presence.slots_missing(self.policy.slots)

    @property
    def is_busy(self) -> bool:
        return self.change is not None or self.interrupted is not None

    def _order_of_replicas(self, plan: Plan) -> Order | None:
        """Attach again what ended with the supervisor before."""
        if not plan.hybrids:
            return None
        return Order(
            decision_id=self._decision_id,
            reason="its replicas ended with the supervisor before",
            old=self.plan,
            wanted=plan,
        )

    def as_carried_out(self, wanted: Plan) -> Plan:
        """`wanted`, its replicas in the core where they have no lanes of their own."""
        return wanted if self._has_lanes or not wanted.hybrids else with_hybrids_in_core(wanted)

    @property
    def _has_lanes(self) -> bool:
        return self._config.global_resource_planner.decouple_communication_domains

    def match(self, wanted: Plan) -> Plan:
        """`wanted` in terms of the plan in force; its new ids are used up."""
        matched = self._matched(wanted)
        self._next_number = max(self._next_number, next_number_after(matched))
        return matched

    def _matched(self, wanted: Plan) -> Plan:
        return matched_by(
            self.policy,
            self.plan,
            wanted,
            next_number=self._next_number,
            lost=self.unusable,
            asleep=self.asleep,
        )

    def put_in_force(self, plan: Plan) -> None:
        """A change has ended with it."""
        if not serves_nothing(plan):
            self.lent_from = None
        elif not serves_nothing(self.plan):
            self.lent_from = self.plan
        self.plan = plan

    def given_back(self) -> Plan | None:
        """The plan in force with the servers of before the loan, matched; None without a loan.

        Replicas on their slots leave. Where the core has taken slots of them it gives them back.
        Those whose slots cannot be had any more stay out if that leaves enough. None too while all
        that could come back are on nodes that are away.
        """
        if self.lent_from is None:
            return None
        core, least = core_slots(self.plan.train), self.policy.min_rollout_gpus
        there = tuple(it for it in self.lent_from.instances if not server_slots(it) & self.unusable)
        free = tuple(it for it in there if not server_slots(it) & core)
        wanted = self.lent_from
        if sum(it.tp for it in free) >= least:
            serving = {slot for it in free for slot in server_slots(it)}
            kept = tuple(it for it in self.plan.hybrids if not hybrid_slots(it) & serving)
            wanted = msgspec.structs.replace(self.plan, instances=free, hybrids=kept)
        elif sum(it.tp for it in there) >= least:
            wanted = msgspec.structs.replace(self.lent_from, instances=there)
        return None if self.presence.missed_by(wanted) else self.match(wanted)

    def renamed(self, plan: Plan) -> Plan:
        """`plan` with fresh names for its replicas: they ended with the supervisor before.

        Without those that this run cannot have any more, for whatever reason.
        """
        hybrids = []
        for hybrid in plan.hybrids if self.hybrids is not None else ():
            if not hybrid_slots(hybrid) <= set(self.policy.slots):
                continue
            name = ReplicaId(f"hybrid-{self._next_number}")
            self._next_number += 1
            hybrids.append(msgspec.structs.replace(hybrid, replica_id=name))
        return msgspec.structs.replace(plan, hybrids=tuple(hybrids))

    def why_not(self, wanted: Plan) -> str:
        """What keeps this run from any plan like `wanted`; empty when nothing does."""
        if wanted.hybrids and self.hybrids is None and not self._writes_replicas_down:
            return f"this run cannot have hybrid replicas{self._what_forbids_replicas()}"
        if wanted.hybrids and wanted.train.dp < wanted.train.ep:
            return (
                f"a replica has {wanted.train.ep} data-parallel ranks, for EP {wanted.train.ep}, "
                f"and the core only {wanted.train.dp}"
            )
        if wanted.hybrids and (why := self._too_many_shards(wanted)):
            return why
        # As if it had been configured: batches have to divide, degrees to fit the model.
        known = check_rules(planned_config(self._config, self.plan))
        for problem in check_rules(planned_config(self._config, wanted)):
            if problem not in known:
                return f"{problem.path} {problem.what}"
        return ""

    @property
    def _writes_replicas_down(self) -> bool:
        """Whether plans with replicas are looked at, though none is ever attached."""
        is_possible = self._has_lanes and self._config.training.train_backend == "megatron_core"
        return self.policy.is_plan_only and is_possible

    def _what_forbids_replicas(self) -> str:
        planner = self._config.global_resource_planner
        if self._config.training.train_backend != "megatron_core":
            return f": train_backend is {self._config.training.train_backend}"
        if not planner.runtime_reconfigure_training:
            return ": runtime_reconfigure_training is false"
        return ""

    def _too_many_shards(self, wanted: Plan) -> str:
        """Every data-parallel rank has to get something of a mini-batch."""
        training = self._config.training
        size = training.mini_batch_size or training.batch_size
        num_shards = wanted.train.dp + len(wanted.hybrids) * wanted.train.ep
        if num_shards <= size:
            return ""
        return f"a mini-batch of {size} trajectories cannot be cut for {num_shards} ranks"

    def ground(self, pool: RolloutPool, placements: tuple[InstancePlacement, ...]) -> Ground:
        """What holds devices now, and what sleeps: what the pool has not given up."""
        servers = []
        for placement in placements:
            member = pool.get(placement.instance_id)
            if member is None or member.state is MemberState.GONE:
                continue
            # A weight reload is a pause of an instance that serves.
            is_serving = member.state in (MemberState.SERVING, MemberState.RELOADING)
            servers.append(Server(placement, Stage.SERVING if is_serving else Stage.STARTING))
        servers += [Server(it, Stage.ASLEEP) for it in self.asleep]
        return Ground(train=self.plan.train, servers=tuple(servers), lost=self.lost)

    def take_over(self, ground: Ground) -> None:
        """Remember of a change that is over what no plan says."""
        self.lost = ground.lost
        self.asleep = tuple(it.placement for it in ground.servers if it.stage is Stage.ASLEEP)

    def lose(self, replica_id: ReplicaId, why: str) -> bool:
        """Go on without a replica that is gone; False when the plan in force has none of it."""
        gone = [it for it in self.plan.hybrids if it.replica_id == replica_id]
        if not gone:
            return False
        kept = tuple(it for it in self.plan.hybrids if it.replica_id != replica_id)
        self.plan = msgspec.structs.replace(self.plan, hybrids=kept)
        self.losses = (*self.losses, Loss(replica_id, why))
        self._freed = self._freed.union(*map(hybrid_slots, gone))
        return True

    @property
    def idle(self) -> frozenset[Slot]:
        """What replicas had that were lost, and nobody has under the plan in force."""
        return self._freed - self.unusable - set(slots_of(self.plan))

    def forget(self, instance_id: InstanceId) -> None:
        """Its process has ended for good."""
        self.asleep = tuple(it for it in self.asleep if it.instance_id != instance_id)

    def ground_in_force(self, pool: RolloutPool) -> Ground:
        """What holds devices while no change is under way."""
        members = tuple(Hybrid(it, is_member=True) for it in self.plan.hybrids)
        ids = {it.replica_id for it in self.plan.hybrids}
        present = () if self.hybrids is None else self.hybrids.present
        # A change that had to be given up has left them behind.
        others = tuple(Hybrid(it) for it in present if it.replica_id not in ids)
        ground = self.ground(pool, self.plan.instances)
        return msgspec.structs.replace(ground, hybrids=(*members, *others))

    def judged(self, pool: RolloutPool, wanted: Plan) -> tuple[Plan, Judgement]:
        """`wanted` as a change would reach it, and its transitions or what refuses it.

        Names of what is new are those that it would get now, and are not used up.
        """
        plan = self.as_carried_out(wanted)
        if why := self.presence.missed_by(plan) or self.why_not(plan):
            return plan, Refusal(why)
        found = self._matched(plan)
        if found == self.plan:
            of_the_core = (
                "; without lanes (decouple_communication_domains: false) what were replicas is a "
                "part of the core: name a smaller one (train_gpus)"
            )
            hint = "" if self._has_lanes else of_the_core
            return found, Refusal(f"this plan is in force already{hint}")
        return found, judged(self.policy, self.ground_in_force(pool), self.plan, found)

    def plan_to_reshape(self) -> Plan:
        """What the gang's next attempt reads as its configuration."""
        if self.change is None:
            raise InvariantError("the gang is to be started anew without a change of the plan")
        return plan_on(self.change.ground, self.plan)

    def count(self, record: ReconfigurationRecord) -> None:
        """Add a change that has ended to the figures."""
        self.num_by_outcome[record.outcome] += 1
        self.seconds_by_phase[STALLED] += record.stalled_s
        for phase, spent_s in record.phases.items():
            self.seconds_by_phase[phase] += spent_s

    def memory_if_changed(self) -> PlanMemory | None:
        """What has to be written down now; None when that is so already."""
        change = self.change
        lost = self.lost if change is None else change.ground.lost
        if change is not None:
            self._decision_id = change.order.decision_id
        memory = PlanMemory(
            decision_id=self._decision_id,
            plan=self.plan if change is None else plan_on(change.ground, self.plan),
            next_number=self._next_number,
            order=self.interrupted if change is None else change.order_so_far,
            lent_from=self.lent_from,
            lost_slots=tuple(sorted(slot for node, slot in lost if not node)),
            lost_elsewhere=tuple(sorted(slot for slot in lost if slot[0])),
            home=self.home,
        )
        if memory == self._kept:
            return None
        self._kept = memory
        return memory
