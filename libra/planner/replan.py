"""Whether the run should go on with another plan: observe, look when there is reason to, decide.

Replanner holds what was observed. `question` is a frozen copy of all that a decision needs, and
`answer` a function of it alone: the search takes up to seconds and may run in a thread while steps
go on. Nothing is changed here; who acts on a Switch tells how it went.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from libra.config.run import RunConfig
from libra.errors import InvariantError
from libra.planner.calibration import Calibration
from libra.planner.demand import num_batches_in_flight
from libra.planner.lending import serves_nothing
from libra.planner.plan import Plan, plan_in_words
from libra.planner.replan_candidates import Bounds, Candidate, bounds_of
from libra.planner.replan_costs import SwitchAccount, SwitchCost, SwitchCosts, SwitchKind, both
from libra.planner.replan_load import ObservedLoad
from libra.planner.replan_observed import ObservationWindow, StepObserved, StepTimes
from libra.planner.replan_rule import Worth, model_error, worth
from libra.planner.replan_triggers import Triggers

if TYPE_CHECKING:
    from libra.planner.plan import Slot

_KINDS: tuple[SwitchKind, ...] = ("rollout", "to_training", "to_rollout", "reshape")
_LEFT_OUT_SHOWN = 2
_MOST_DOUBLINGS = 4
"""Of the cooldown, by failures in a row."""


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """The plan in force stays."""

    reason: str
    numbers: dict[str, float]
    candidate: Plan | None = None
    """The best other plan; None when there is none, or nobody looked."""

    is_recorded: bool = False
    """`candidate` is worth it, and only written down (`runtime_training_pool_plan_only`)."""


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """The run should go on with `plan`."""

    plan: Plan
    kind: SwitchKind
    reason: str
    numbers: dict[str, float]


class Ordered(msgspec.Struct, frozen=True, kw_only=True):
    """The run is to go on with `plan` because an operator said so."""

    plan: Plan
    kind: SwitchKind
    reason: str
    numbers: dict[str, float]


Verdict: TypeAlias = Keep | Switch


def _everything(_plan: Plan) -> str:
    """Any plan can be gone over to."""
    return ""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision depends on."""

    config: RunConfig
    plan: Plan
    bounds: Bounds
    book: Calibration | None
    """None when hardware or model are not described."""

    steps: tuple[StepObserved, ...]
    """Whose lengths are the demand; empty for the configured prior."""

    sorts: tuple[tuple[StepObserved, ...], ...]
    """`steps`, those that have little in common apart."""

    times: StepTimes | None
    refused: frozenset[SwitchKind]
    """Kinds that were refused, and are left out."""

    why_not: Callable[[Plan], str]
    """What keeps the run from going over to a plan; empty when nothing does."""

    cost_of: dict[SwitchKind, SwitchCost]
    horizon_steps: float
    level_left_steps: float
    """How much longer the load is taken to be as observed; a bound of the horizon."""

    cooldown_left_s: float
    triggers: tuple[str, ...]
    lead_steps: float = 0.0
    """How long training can go on with what rollouts have made so far."""


class Replanner:
    """What was observed of a run and of its own changes. Not for two threads at once."""

    def __init__(
        self,
        config: RunConfig,
        *,
        num_gpus: int,
        book: Calibration | None,
        gpus_per_node: int | None = None,
    ) -> None:
        """`config` as given, without a plan in it: sizes of a plan are where its search begins.

        `num_gpus`: slots of the run. `book`: what the model was corrected by at the start.
        `gpus_per_node`: as for `bounds_of`.
        """
        planner = config.global_resource_planner
        self.book = book
        """Set it to what has been learned since."""

        self.lost: frozenset[Slot] = frozenset()
        """Slots of processes that do not end, and of nodes that are away; set it when they
        change."""

        self._num_gpus = num_gpus
        self._gpus_per_node = gpus_per_node
        self._config = config
        self._refused: frozenset[SwitchKind] = frozenset()
        self._is_online = planner.runtime_online_replanning
        self._cooldown_s = planner.runtime_replan_cooldown_s
        self._payback_steps = planner.runtime_payback_steps
        self._window = ObservationWindow(
            max_steps=planner.runtime_replan_window_steps,
            num_warm_up=num_batches_in_flight(config),
        )
        self._triggers = Triggers(interval_steps=planner.runtime_replan_interval_steps)
        self._costs = SwitchCosts(prior_s=planner.runtime_switch_cost_prior_s)
        self._account: SwitchAccount | None = None
        self._is_ordered = False
        self._cooling_until = -inf
        self._num_failures = 0

    @property
    def is_switching(self) -> bool:
        """A change was begun and has not ended."""
        return self._account is not None and not self._account.has_ended

    def on_step(self, seen: StepObserved) -> None:
        """Take in a step that ended."""
        is_disturbed = self._account is not None
        changed = self._window.add(seen, is_timed=not is_disturbed)
        if changed:
            self._refused = frozenset()
        self._triggers.on_step(seen, changed=changed)
        if self._account is not None:
            self._account.on_step(seen.step_s)
            if self._account.is_complete:
                self._costs.add(self._account.kind, self._account.cost_s)
                self._account = None

    def on_switch_begun(self, switch: Switch | Ordered) -> None:
        """Steps from here on have the change in them. One that was ordered is like any other.

        Its cost is a measurement, the cooldown begins when it ends, and times are observed anew.
        """
        times = self._window.times()
        self._is_ordered = isinstance(switch, Ordered)
        self._account = SwitchAccount(
            kind=switch.kind,
            usual_s=None if times is None else times.mean_s,
            expected_s=switch.numbers.get("candidate_step_s"),
        )

    def on_switched(
        self, stalled_s: float, now: float, *, ok: bool, is_refused: bool = False
    ) -> None:
        """The change begun last has ended; `stalled_s` the trainer stood still for it.

        A kind that was refused is left out until the load or the plan is another one; a refused
        order means nothing.
        """
        if self._account is None:
            raise InvariantError("a change of the plan ended that was not begun")
        if is_refused and self._is_ordered:
            self._account = None
            return
        self._account.on_ended(stalled_s, ok=ok)
        self._num_failures = 0 if ok else self._num_failures + 1
        doublings = max(0, min(self._num_failures - 1, _MOST_DOUBLINGS))
        self._cooling_until = now + self._cooldown_s * 2**doublings
        if is_refused:
            self._refused |= {self._account.kind}
            self._account = None
        if ok:
            self._refused = frozenset()
            self._window.forget_times()

    def on_other_plan(self) -> None:
        """The plan is another one, since a node was lost or is back."""
        self._refused = frozenset()
        self._window.forget_times()

    def on_given_back(self, now: float) -> None:
        """A server that was lent came back by itself: as after a change that was decided."""
        self._cooling_until = now + self._cooldown_s
        self._window.forget_times()

    def due(self, now: float) -> bool:
        """Whether there is reason for a look at the plan now."""
        if not self._is_online or self.is_switching or now < self._cooling_until:
            return False
        return bool(self._triggers.reasons) and self._window.num_steps > 0

    def decide(
        self, plan: Plan, now: float, steps_left: float, *, is_asked: bool = False
    ) -> Verdict:
        """Question and answer in one; `is_asked` by an operator, who need not wait."""
        return answer(self.question(plan, now, steps_left, is_asked=is_asked))

    def question(
        self,
        plan: Plan,
        now: float,
        steps_left: float,
        *,
        is_asked: bool = False,
        why_not: Callable[[Plan], str] = _everything,
        lead_steps: float = 0.0,
    ) -> Question:
        """What a decision about `plan` depends on now; the reasons so far are taken.

        `why_not` says what keeps the run from going over to another plan; empty when nothing does.
        `lead_steps`: how long training can go on with what rollouts have made so far.
        """
        triggers = self._triggers.take()
        is_observed = self._is_online and self._window.num_steps > 0
        level_left_steps = self._window.left_steps if is_observed else inf
        return Question(
            config=self._config,
            plan=plan,
            bounds=bounds_of(
                self._config,
                num_gpus=self._num_gpus,
                gpus_per_node=self._gpus_per_node,
                lost=self.lost,
            ),
            refused=self._refused,
            why_not=why_not,
            book=self.book,
            steps=self._window.steps if self._is_online else (),
            sorts=self._window.sorts() if self._is_online else (),
            times=self._window.times() if self._is_online else None,
            cost_of={kind: self._costs.of(kind) for kind in _KINDS},
            horizon_steps=max(0.0, min(self._payback_steps, steps_left, level_left_steps)),
            level_left_steps=level_left_steps,
            cooldown_left_s=0.0 if is_asked else max(0.0, self._cooling_until - now),
            triggers=("asked for",) if is_asked else triggers,
            lead_steps=lead_steps,
        )


def answer(question: Question) -> Verdict:
    """Look at all plans that are allowed and say whether one of them is worth its cost."""
    numbers = _observed(question)
    why_not = _why_not_look(question)
    if why_not or question.book is None:
        return Keep(reason=_said(question, why_not), numbers=numbers)
    load = ObservedLoad(question.config, question.sorts, question.book)
    looked = load.candidates(
        question.plan, question.bounds, why_not=question.why_not, lead_steps=question.lead_steps
    )
    found = [it for it in looked.candidates if it.kind not in question.refused]
    if not question.plan.instances:
        return _to_serve(question, found, source=load.source, numbers=numbers)
    expected_s = load.step_s(question.plan)
    error = model_error(expected_s=expected_s, times=question.times)
    numbers |= {"step_s": error.bias * expected_s}
    options = [
        _Option(
            candidate=candidate,
            worth=worth(
                expected_s=expected_s,
                candidate_s=candidate.step_s,
                error=error,
                cost=_cost_of(question, candidate),
                horizon_steps=min(question.horizon_steps, candidate.lasts_steps),
            ),
        )
        for candidate in found
    ]
    notes = [load.source, *(f"not possible: {why}" for why in looked.left_out[:_LEFT_OUT_SHOWN])]
    return _choice(question, options, notes=notes, numbers=numbers)


def _cost_of(question: Question, candidate: Candidate) -> SwitchCost:
    """One that does not last is paid there and back."""
    cost = question.cost_of[candidate.kind]
    return cost if candidate.lasts_steps == inf else both(cost, question.cost_of["to_rollout"])


class _Option(msgspec.Struct, frozen=True, kw_only=True):
    candidate: Candidate
    worth: Worth

    def in_words(self) -> str:
        return f"{plan_in_words(self.candidate.plan)}: {self.worth.in_words()}"


def _choice(
    question: Question, options: Sequence[_Option], *, notes: list[str], numbers: dict[str, float]
) -> Verdict:
    """The option that earns most, if that is enough; training changes perhaps only in words."""
    recorded = None
    if question.refused:
        notes.append(f"left out since they were refused: {', '.join(sorted(question.refused))}")
    if question.bounds.training == "recorded":
        recorded = _worthiest(o for o in options if o.candidate.kind != "rollout")
        options = [o for o in options if o.candidate.kind == "rollout"]
    if recorded is not None:
        is_worth_it = "worth it" if recorded.worth.is_enough else "not enough"
        notes.append(
            "only written down, since runtime_training_pool_plan_only is true, and "
            f"{is_worth_it}: {recorded.in_words()}"
        )
        numbers |= {f"recorded_{name}": value for name, value in recorded.worth.numbers().items()}
    best = _worthiest(options)
    if best is None:
        notes.append("no other plan that may be made is as fast as the one in force")
        return _kept(_said(question, *notes), numbers, recorded, None)
    numbers |= best.worth.numbers()
    if not best.worth.is_enough:
        reason = _said(question, *notes, f"not enough: {best.in_words()}")
        return _kept(reason, numbers, recorded, best)
    return Switch(
        plan=best.candidate.plan,
        kind=best.candidate.kind,
        reason=_said(question, *notes, f"worth it: {best.in_words()}"),
        numbers=numbers,
    )


def _kept(
    reason: str, numbers: dict[str, float], recorded: _Option | None, best: _Option | None
) -> Keep:
    shown = recorded or best
    return Keep(
        reason=reason,
        numbers=numbers,
        candidate=None if shown is None else shown.candidate.plan,
        is_recorded=recorded is not None and recorded.worth.is_enough,
    )


def _worthiest(options: Iterable[_Option]) -> _Option | None:
    return max(options, key=lambda option: option.worth.net_s, default=None)


def _to_serve(
    question: Question, found: Sequence[Candidate], *, source: str, numbers: dict[str, float]
) -> Verdict:
    """Out of a plan under which no step would ever end: the fastest, whatever it costs."""
    made = [c for c in found if question.bounds.training != "recorded" or c.kind == "rollout"]
    fastest = min(made, key=lambda candidate: candidate.step_s, default=None)
    if fastest is None:
        return Keep(
            reason=_said(question, source, "nothing serves, and no plan would"),
            numbers=numbers,
        )
    numbers |= {"candidate_step_s": fastest.step_s}
    words = f"{plan_in_words(fastest.plan)}: {fastest.step_s:.1f} s a step"
    return Switch(
        plan=fastest.plan,
        kind=fastest.kind,
        reason=_said(question, source, f"nothing serves under the plan in force; {words}"),
        numbers=numbers,
    )


def _why_not_look(question: Question) -> str:
    if question.plan.hybrids and serves_nothing(question.plan):
        return (
            f"the last server is lent while there is something to train on, "
            f"{question.lead_steps:.0f} batches now, and comes back by itself"
        )
    if question.cooldown_left_s > 0:
        return f"{question.cooldown_left_s:.0f} s of the cooldown are left"
    if question.level_left_steps < 1:
        return "the load changes too soon again, by how long it was the same before"
    if question.horizon_steps < 1:
        return f"{question.horizon_steps:.1f} steps are left"
    if question.book is None:
        return "hardware or model_arch are not described, so nothing can be priced"
    if not question.bounds.changes_rollout:
        return "runtime_manage_rollout_processes is false: servers of others are not changed"
    return ""


def _observed(question: Question) -> dict[str, float]:
    numbers = {
        "num_steps_observed": float(len(question.steps)),
        "num_trajectories_observed": float(sum(len(step.lengths) for step in question.steps)),
        "horizon_steps": question.horizon_steps,
        "cooldown_left_s": question.cooldown_left_s,
    }
    if question.times is not None:
        numbers |= {
            "num_steps_timed": float(question.times.num_steps),
            "measured_step_s": question.times.mean_s,
            "measured_step_deviation_s": question.times.deviation_s,
        }
    return numbers


def _said(question: Question, *parts: str) -> str:
    return "; ".join([", ".join(question.triggers), *parts] if question.triggers else parts)
