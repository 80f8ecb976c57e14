"""Where a running plan is looked at: after steps, and when an operator asks.

Steps are shown to the Replanner in the loop, the search runs in a thread, and every look has its
line in reconfigurations.jsonl before anything follows from it.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Final, Literal, Never

import anyio
import anyio.to_thread
import msgspec

from libra import clock
from libra.config.run import RunConfig
from libra.errors import InfeasiblePlanError
from libra.ids import SlotId
from libra.planner.calibration import Calibration
from libra.planner.matching import next_number_after
from libra.planner.plan import Plan, plan_in_words
from libra.planner.replan import Keep, Ordered, Question, Replanner, Switch, Verdict, answer
from libra.planner.replan_observed import StepObserved
from libra.planner.replan_order import expectations, kind_of, ordered_plan
from libra.planner.replan_seating import Room
from libra.pools.change_policy import Judgement, Refusal, judged, matched_by
from libra.pools.transition import in_words
from libra.scheduling.explanation import InstanceView
from libra.tracing.log import get_log
from libra.wire.api import PlanOrder, VerbReply
from libra_supervisor.events import Event, ReconfigurationEnded, ReconfigurationWanted
from libra_supervisor.loop.commands import Command, WriteStep
from libra_supervisor.loop.control import Control
from libra_supervisor.loop.plan_life import why_not_lent, why_not_now
from libra_supervisor.records.reconfiguration import DecisionRecord, Line

_log = get_log()

NOT_ENABLED = "runtime_dynamic_reconfiguration_enabled is false: the plan stays as it is"


class DeskPorts(msgspec.Struct, frozen=True, kw_only=True):
    """What the desk reads and whom it tells."""

    control: Control
    book: Callable[[], Calibration | None]
    """The model's correction as it is now."""

    instances: Callable[[], Sequence[InstanceView]]
    write: Callable[[Line], None]
    """Blocks."""

    post: Callable[[Event], Awaitable[None]]
    gpus_per_node: int
    """Devices of each machine, those that no plan uses included."""

    lead_steps: Callable[[], float] = lambda: 0.0
    """How long training could go on if nothing served."""


class Outcomes(msgspec.Struct, kw_only=True):
    """Counts since the process began."""

    num_decisions: Counter[str] = msgspec.field(default_factory=Counter)
    """By verdict."""

    num_ended: Counter[str] = msgspec.field(default_factory=Counter)
    """Changes by outcome, whoever wanted them."""

    last: DecisionRecord | None = None
    """The newest look or order, but for those beside a change that one of them began."""

    is_last_refused: bool = False
    last_ended: ReconfigurationEnded | None = None


class ReplanDesk:
    """One look at a time. Only the loop and its tasks call it."""

    def __init__(
        self,
        config: RunConfig,
        replanner: Replanner,
        ports: DeskPorts,
        *,
        last_decision_id: int,
        started_at: float,
    ) -> None:
        """`config` is the run's. Ids of decisions go on from `last_decision_id`."""
        self.outcomes = Outcomes()
        self._config, self._replanner, self._ports = config, replanner, ports
        self._last_id = last_decision_id
        self._started_at = started_at
        self._step = 0
        self._step_s = 0.0
        self._pending_id: int | None = None
        self._recorded: Plan | None = None
        self._plan_seen = ports.control.plans.plan
        self._is_looking = anyio.Lock()
        self._stepped = anyio.Event()

    @property
    def last_in_words(self) -> str:
        """For people; empty before the first look."""
        last = self.outcomes.last
        if last is None:
            return ""
        taken = "order refused" if self.outcomes.is_last_refused else _taken(last)
        return f"{taken} after step {last.step}: {last.reason}"

    async def run(self) -> Never:
        """Look after steps, when there is reason to, until cancelled."""
        while True:
            await self._stepped.wait()
            self._stepped = anyio.Event()
            if self._may_look():
                await self._look(is_asked=False, is_dry_run=False)

    def on_command(self, command: Command) -> None:
        """Take in a step that ended."""
        if isinstance(command, WriteStep):
            seen = self._seen(command)
            self._step, self._step_s = seen.step, seen.step_s
            self._replanner.on_step(seen)
            self._look_for_other_plan()
            self._stepped.set()

    def _look_for_other_plan(self) -> None:
        """A replica that was lost takes its part of the plan away without a change of the plan."""
        plan = self._ports.control.plans.plan
        if plan != self._plan_seen and not self._replanner.is_switching:
            self._replanner.on_other_plan()
        self._plan_seen = plan

    def on_event(self, event: Event) -> None:
        """Learn how a change went that this desk wanted."""
        if not isinstance(event, ReconfigurationEnded):
            return
        self.outcomes.num_ended[event.outcome] += 1
        self.outcomes.last_ended = event
        if event.cause in ("node_lost", "node_back") and event.outcome == "done":
            self._replanner.on_other_plan()
        if event.cause == "starved" and event.outcome == "done":
            self._replanner.on_given_back(clock.now())
        if event.decision_id == self._pending_id:
            self._pending_id = None
            self._replanner.on_switched(
                event.stalled_s,
                clock.now(),
                ok=event.outcome == "done",
                is_refused=event.outcome == "refused",
            )

    async def ask(self, *, is_dry_run: bool) -> VerbReply:
        """An operator's look, now; unless it is a dry run, what it finds worth it is done."""
        planner = self._config.global_resource_planner
        if not is_dry_run and not planner.runtime_dynamic_reconfiguration_enabled:
            return VerbReply(ok=False, message=f"{NOT_ENABLED}; --dry-run shows what would be done")
        if not is_dry_run and self._is_busy:
            return VerbReply(ok=False, message="a change of the plan is under way")
        record, verdict = await self._look(is_asked=True, is_dry_run=is_dry_run)
        return VerbReply(
            ok=True,
            message=_answer(record),
            details=msgspec.to_builtins(record) | {"plan_wanted": _wanted(verdict)},
        )

    async def order(self, order: PlanOrder, *, is_dry_run: bool) -> VerbReply:
        """Go over to the plan that an operator names, whatever it earns, or say what refuses it."""
        planner = self._config.global_resource_planner
        if not is_dry_run and not planner.runtime_dynamic_reconfiguration_enabled:
            return VerbReply(ok=False, message=f"{NOT_ENABLED}; --dry-run shows what would be done")
        async with self._is_looking:
            question = self._question(is_asked=True)
            try:
                wanted = ordered_plan(question.plan, order, self._room(question))
            except InfeasiblePlanError as error:
                return VerbReply(ok=False, message=str(error))
            return await self._order(question, wanted, is_dry_run=is_dry_run)

    async def _order(self, question: Question, wanted: Plan, *, is_dry_run: bool) -> VerbReply:
        control = self._ports.control
        plan, judgement = control.plans.judged(control.pool, wanted)
        if why := self._why_not_now() or why_not_lent(control, plan):
            judgement = Refusal(why)
        refusal = judgement.reason if isinstance(judgement, Refusal) else ""
        numbers = {} if refusal else expectations(question, plan)
        reason = f"ordered by the operator{': ' if refusal else ''}{refusal}"
        kind = kind_of(question.plan, plan)
        ordered = Ordered(plan=plan, kind=kind, reason=reason, numbers=numbers)
        record = self._record(question, ordered, is_dry_run=is_dry_run)
        await anyio.to_thread.run_sync(self._ports.write, record)
        self._note(record, is_refused=bool(refusal))
        if not is_dry_run:
            await self._give(record.decision_id, ordered, wanted, is_refused=bool(refusal))
        words = _in_words(judgement)
        details = {"plan_wanted": msgspec.to_builtins(plan), "transitions": words}
        return VerbReply(
            ok=not refusal,
            message=_answer(record, words, is_refused=bool(refusal)),
            details=msgspec.to_builtins(record) | details,
        )

    async def _give(
        self, decision_id: int, ordered: Ordered, wanted: Plan, *, is_refused: bool
    ) -> None:
        """To the changing part, also what it is going to refuse: its line says so."""
        if not is_refused:
            self._pending_id = decision_id
            self._replanner.on_switch_begun(ordered)
        await self._ports.post(ReconfigurationWanted(decision_id, wanted, ordered.reason))

    def _why_not_now(self) -> str:
        if self._pending_id is not None:
            return "another change of the plan is under way"
        return why_not_now(self._ports.control)

    def _room(self, question: Question) -> Room:
        """An order may use idle devices; the planner plans for those that the run asked for."""
        policy, room = self._ports.control.plans.policy, question.bounds.room
        per_node, there = self._ports.gpus_per_node, set(policy.slots)
        nodes = {node for node, _ in there}
        grid = {(node, SlotId(slot)) for node in nodes for slot in range(per_node)}
        lost = room.lost | (grid - there)
        return msgspec.structs.replace(
            room, num_gpus=len(grid - lost), gpus_per_node=per_node, lost=lost
        )

    @property
    def _is_busy(self) -> bool:
        return self._pending_id is not None or self._ports.control.plans.is_busy

    def _may_look(self) -> bool:
        planner = self._config.global_resource_planner
        is_on = planner.runtime_dynamic_reconfiguration_enabled
        return is_on and not self._is_busy and self._replanner.due(clock.now())

    async def _look(self, *, is_asked: bool, is_dry_run: bool) -> tuple[DecisionRecord, Verdict]:
        async with self._is_looking:
            question = self._question(is_asked=is_asked)
            verdict = await anyio.to_thread.run_sync(answer, question)
            # The run went on meanwhile, and somebody else may have begun a change.
            is_dry_run = is_dry_run or self._is_busy
            record = self._record(question, verdict, is_dry_run=is_dry_run)
            await anyio.to_thread.run_sync(self._ports.write, record)
            self._note(record)
            if not is_dry_run:
                await self._follow(record.decision_id, verdict)
        return record, verdict

    def _question(self, *, is_asked: bool) -> Question:
        plans = self._ports.control.plans
        if self._config.global_resource_planner.runtime_online_replanning:
            self._replanner.book = self._ports.book()
        self._replanner.lost = plans.unusable
        return self._replanner.question(
            plans.plan,
            clock.now(),
            self._steps_left(),
            is_asked=is_asked,
            why_not=self._why_not(),
            lead_steps=self._ports.lead_steps(),
        )

    async def _follow(self, decision_id: int, verdict: Verdict) -> None:
        match verdict:
            case Switch(plan=plan):
                self._pending_id = decision_id
                self._replanner.on_switch_begun(verdict)
            case Keep(candidate=plan, is_recorded=True) if plan not in {None, self._recorded}:
                # Refused as such, and written down with the way there; once for each plan.
                self._recorded = plan
            case _:
                return
        if plan is not None:
            await self._ports.post(ReconfigurationWanted(decision_id, plan, verdict.reason))

    def _why_not(self) -> Callable[[Plan], str]:
        """What the changing part would say of a plan, from where the run stands now."""
        control = self._ports.control
        plans, pool = control.plans, control.pool
        plan, ground = plans.plan, plans.ground_in_force(pool)
        # What is only written down has to be possible all the same.
        policy = plans.policy.as_if_made()

        def why_not(wanted: Plan) -> str:
            if not policy.is_enabled:
                return ""
            if why := (
                plans.presence.missed_by(wanted)
                or why_not_lent(control, wanted)
                or plans.why_not(wanted)
            ):
                return why
            number = next_number_after(plan)
            found = matched_by(policy, plan, wanted, next_number=number, lost=plans.unusable)
            judgement = judged(policy, ground, plan, found)
            return judgement.reason if isinstance(judgement, Refusal) else ""

        return why_not

    def _record(
        self, question: Question, verdict: Verdict | Ordered, *, is_dry_run: bool
    ) -> DecisionRecord:
        self._last_id += 1
        wanted = verdict.candidate if isinstance(verdict, Keep) else verdict.plan
        return DecisionRecord(
            decision_id=self._last_id,
            wall_time_ns=clock.wall_ns(),
            step=self._step,
            verdict=_VERDICTS[type(verdict)],
            switch_kind="" if isinstance(verdict, Keep) else verdict.kind,
            reason=verdict.reason,
            numbers=verdict.numbers,
            plan=plan_in_words(question.plan),
            candidate="" if wanted is None else plan_in_words(wanted),
            is_dry_run=is_dry_run,
        )

    def _note(self, record: DecisionRecord, *, is_refused: bool = False) -> None:
        if self._pending_id is None:
            self.outcomes.last, self.outcomes.is_last_refused = record, is_refused
        if record.verdict != "ordered":
            self.outcomes.num_decisions[record.verdict] += 1
        elif not record.is_dry_run:
            self.outcomes.num_decisions["order_refused" if is_refused else "ordered"] += 1
        _log.info(
            "plan_looked_at",
            decision_id=record.decision_id,
            verdict=record.verdict,
            reason=record.reason,
            is_dry_run=record.is_dry_run,
        )

    def _steps_left(self) -> float:
        """By the steps that were asked for, and by the time that is allowed."""
        control = self._config.control
        left = inf if control.total_steps is None else float(control.total_steps - self._step)
        if control.max_run_s is not None and self._step_s > 0:
            left_s = self._started_at + control.max_run_s - clock.now()
            left = min(left, left_s / self._step_s)
        return max(0.0, left)

    def _seen(self, command: WriteStep) -> StepObserved:
        record = command.record
        views = self._ports.instances()
        bound = self._config.rollout.max_head_offpolicyness
        queued = [view.num_queued for view in views if view.num_queued is not None]
        kv_use = [view.kv_use_fraction for view in views if view.kv_use_fraction is not None]
        num_in_flight = sum(view.own_requests for view in views)
        return StepObserved(
            step=record.step,
            lengths=command.finished,
            step_s=record.step_s,
            trainer_idle_fraction=_share(record.rollout_wait_s, record.step_s),
            rollout_idle_fraction=1.0 - _share(record.rollout_s, record.step_s),
            staleness_fraction=_share(record.staleness_mean, bound) if 0 < bound < inf else None,
            queued_fraction=_share(sum(queued), num_in_flight) if queued else None,
            kv_use_fraction=sum(kv_use) / len(kv_use) if kv_use else None,
        )


_VERDICTS: Final[dict[type, Literal["keep", "switch", "ordered"]]] = {
    Keep: "keep",
    Switch: "switch",
    Ordered: "ordered",
}


def _share(part: float, whole: float) -> float:
    return max(0.0, min(1.0, part / whole)) if whole > 0 else 0.0


def _taken(record: DecisionRecord) -> str:
    if record.verdict == "keep":
        return "plan kept"
    if record.verdict == "ordered":
        return "order looked at" if record.is_dry_run else "change ordered"
    return "switch found worth it" if record.is_dry_run else "switch decided"


def _answer(
    record: DecisionRecord, transitions: Sequence[str] = (), *, is_refused: bool = False
) -> str:
    """What `replan` prints: verdict, plans, reason, every number under its name, and the way."""
    taken = "order refused" if is_refused else _taken(record)
    other = "ordered:  " if record.verdict == "ordered" else "candidate:"
    lines = [
        f"{taken} (decision {record.decision_id}, after step {record.step})",
        f"in force:  {record.plan}",
        f"{other} {record.candidate or 'none'}",
        f"because:   {record.reason}",
        *(f"  {name} {value:.6g}" for name, value in record.numbers.items()),
        *(f"{number}. {words}" for number, words in enumerate(transitions, 1)),
    ]
    return "\n".join(lines)


def _in_words(judgement: Judgement) -> tuple[str, ...]:
    if isinstance(judgement, Refusal):
        return judgement.transitions
    return tuple(map(in_words, judgement))


def _wanted(verdict: Verdict) -> object:
    plan = verdict.candidate if isinstance(verdict, Keep) else verdict.plan
    return msgspec.to_builtins(plan)
