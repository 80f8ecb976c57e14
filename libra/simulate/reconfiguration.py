"""A change of the plan in a simulated run, in the order of the real one, with assumed times.

Instances that go are drained or stopped, those that come need a start; both wait for a publication
in flight. Replicas leave training at a step boundary and join it at the first boundary after they
are ready. Another core holds training from a boundary on, while it is written and read. Nothing
fails.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from libra.ids import PolicyVersion
from libra.planner.plan import InstancePlacement, Plan
from libra.simulate.fleet import Fleet
from libra.simulate.timeline import Timeline


class SwitchTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. A server's start is the planner's, the others are assumed."""

    start_s: float = 60.0
    """From an instance's slots being free to its first request."""

    join_s: float = 30.0
    """A replica's start and its way to the core's state, beside the steps."""

    reshape_s: float = 120.0
    """Checkpoint and new gang; training stands still."""


class PlanChange(msgspec.Struct, frozen=True, kw_only=True):
    """What is changed, and how."""

    old: Plan
    new: Plan
    times: SwitchTimes
    drains: bool
    """Instances end what they run before they go."""

    @property
    def reshapes(self) -> bool:
        return _core(self.old) != _core(self.new)

    @property
    def joins(self) -> bool:
        return not self.reshapes and len(self.new.hybrids) > len(self.old.hybrids)

    @property
    def going(self) -> list[InstancePlacement]:
        return _without(self.old, self.new)

    @property
    def coming(self) -> list[InstancePlacement]:
        return _without(self.new, self.old)


class ChangingRun(Protocol):
    """What a change needs of the run."""

    @property
    def is_publishing(self) -> bool: ...

    @property
    def is_training(self) -> bool: ...

    @property
    def served(self) -> PolicyVersion: ...

    def hold(self, *, is_held: bool) -> None:
        """Begin no step while held."""
        ...

    def train_as(self, plan: Plan) -> None:
        """Steps from here on have this plan's training side."""
        ...


class Reconfiguration:
    """One change, begun at a step boundary. `done` is called once with the seconds of the hold."""

    def __init__(
        self,
        run: ChangingRun,
        timeline: Timeline,
        fleet: Fleet,
        change: PlanChange,
        *,
        done: Callable[[float], None],
    ) -> None:
        self._run, self._timeline, self._fleet = run, timeline, fleet
        self._change, self._done = change, done
        self._after_publication: list[Callable[[], None]] = []
        self._at_boundary: Callable[[], None] | None = None
        self._stalled_s = 0.0
        self._num_going = len(change.going)
        self._num_open = len(change.coming) + change.reshapes + change.joins

    def start(self) -> None:
        change = self._change
        if not change.reshapes and not change.joins:
            self._run.train_as(change.new)
        self._when_published(self._clear)

    def on_boundary(self) -> None:
        """A step has ended."""
        action, self._at_boundary = self._at_boundary, None
        if action is not None:
            action()

    def on_committed(self) -> None:
        """A publication has ended."""
        waiting, self._after_publication = self._after_publication, []
        for action in waiting:
            action()

    def _clear(self) -> None:
        for placement in self._change.going:
            self._fleet.retire(
                placement.instance_id, drains=self._change.drains, done=self._on_gone
            )
        if not self._change.going:
            self._on_cleared()

    def _on_gone(self) -> None:
        self._num_going -= 1
        if self._num_going == 0:
            self._on_cleared()

    def _on_cleared(self) -> None:
        """The slots that rollout gives up are free."""
        if self._change.reshapes:
            if self._run.is_training:
                self._at_boundary = self._reshape
            else:
                self._reshape()
            return
        if self._change.joins:
            self._after(self._change.times.join_s, self._on_ready)
        self._bring()

    def _reshape(self) -> None:
        self._run.hold(is_held=True)
        self._stalled_s = self._change.times.reshape_s
        self._after(self._stalled_s, self._on_reshaped)
        self._bring()

    def _on_reshaped(self) -> None:
        self._run.train_as(self._change.new)
        self._run.hold(is_held=False)
        self._close()

    def _on_ready(self) -> None:
        if self._run.is_training:
            self._at_boundary = self._join
        else:
            self._join()

    def _join(self) -> None:
        self._run.train_as(self._change.new)
        self._close()

    def _bring(self) -> None:
        for placement in self._change.coming:
            arrive = partial(self._when_published, partial(self._arrive, placement))
            self._after(self._change.times.start_s, arrive)
        if self._num_open == 0:
            self._done(self._stalled_s)

    def _arrive(self, placement: InstancePlacement) -> None:
        self._fleet.add(placement, self._run.served)
        self._close()

    def _when_published(self, action: Callable[[], None]) -> None:
        """Now, or after the publication in flight, which goes to those that were there before."""
        if self._run.is_publishing:
            self._after_publication.append(action)
        else:
            action()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._timeline.at(self._timeline.now + seconds, action)

    def _close(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._done(self._stalled_s)


def _core(plan: Plan) -> tuple[int, ...]:
    train = plan.train
    return (train.tp, train.pp, train.cp, train.ep, train.dp, train.micro_batch_size or 0)


def _without(plan: Plan, other: Plan) -> list[InstancePlacement]:
    """Instances of `plan` that `other` has not on the same slots."""
    there = {(i.tp, i.node, i.slots) for i in other.instances}
    return [i for i in plan.instances if (i.tp, i.node, i.slots) not in there]
