"""What is seen of a simulated run: step by step by who may change its plan, and at its end."""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from libra.planner.replan_observed import StepObserved
from libra.simulate.fleet import Fleet
from libra.simulate.result import StepRecord, TpUse

if TYPE_CHECKING:
    from libra.ids import InstanceId


class RunMeter:
    """Reads the fleet and changes nothing of it."""

    def __init__(self, fleet: Fleet, *, max_head_offpolicyness: float) -> None:
        self._fleet = fleet
        self._max_head_offpolicyness = max_head_offpolicyness
        self._ended: list[tuple[int, int]] = []
        self._busy_s_of: dict[InstanceId, float] = {}

    def on_ended(self, *, prompt_tokens: int, response_tokens: int) -> None:
        self._ended.append((prompt_tokens, response_tokens))

    def take_seen(self, steps: Sequence[StepRecord]) -> StepObserved:
        """Of the last of `steps`; its lengths are those that ended since the call before."""
        step = steps[-1]
        begun_at = steps[-2].freed_at if len(steps) > 1 else 0.0
        step_s = step.freed_at - begun_at
        counts = [instance.engine.counts() for instance in self._fleet.instances]
        num_here = sum(c.num_running + c.num_waiting for c in counts)
        bound = self._max_head_offpolicyness
        lengths, self._ended = tuple(self._ended), []
        return StepObserved(
            step=step.step,
            lengths=lengths,
            step_s=step_s,
            trainer_idle_fraction=min(1.0, step.waited_s / step_s),
            rollout_idle_fraction=self._rollout_idle_fraction(step_s),
            staleness_fraction=step.mean_staleness / bound if 0 < bound < inf else None,
            queued_fraction=sum(c.num_waiting for c in counts) / max(1, num_here),
            kv_use_fraction=sum(c.kv_use_fraction for c in counts) / max(1, len(counts)),
        )

    def _rollout_idle_fraction(self, step_s: float) -> float:
        """Of the step, on average over the instances that are there."""
        busy_s_of = {i.instance_id: i.engine.counts().busy_s for i in self._fleet.instances}
        before, self._busy_s_of = self._busy_s_of, busy_s_of
        idle_s = [step_s - busy_s + before.get(name, 0.0) for name, busy_s in busy_s_of.items()]
        return max(0.0, min(1.0, sum(idle_s) / len(idle_s) / step_s)) if idle_s else 1.0

    def uses(self, *, elapsed_s: float) -> tuple[TpUse, ...]:
        """By TP degree, the largest first."""
        found = []
        for tp in sorted({instance.tp for instance in self._fleet.instances}, reverse=True):
            counts = [i.engine.counts() for i in self._fleet.instances if i.tp == tp]
            found.append(
                TpUse(
                    tp=tp,
                    num_instances=len(counts),
                    busy_fraction=sum(c.busy_s for c in counts) / len(counts) / elapsed_s,
                    num_preemptions=sum(c.num_preemptions for c in counts),
                )
            )
        return tuple(found)
