"""Evaluations of one run, one after the other. Pure."""

from libra.errors import InvariantError
from libra.ids import GroupId, PolicyVersion
from libra.rollouts.evaluation import Evaluation, EvaluationTerms
from libra.rollouts.trajectory import SampleFailed, Trajectory
from libra_supervisor.loop.commands import (
    CancelEvaluated,
    Command,
    Say,
    StartEvaluated,
    WriteEvaluation,
)
from libra_supervisor.loop.moment import Moment
from libra_supervisor.records.evaluation import EvaluationRecord


class Evaluator:
    """At most one evaluation at a time; what comes in for one that was dropped is ignored."""

    def __init__(self, terms: EvaluationTerms | None) -> None:
        """None: this run evaluates nothing."""
        self._terms = terms
        self._open: Evaluation | None = None
        self._begun_at = 0.0
        self.just_done: PolicyVersion | None = None
        """Set by the call that ends an evaluation; the caller takes it and sets it to None."""

        self.last: EvaluationRecord | None = None

    @property
    def progress(self) -> tuple[int, int] | None:
        """How many trajectories have ended, of how many; None while nothing is evaluated."""
        return None if self._open is None else self._open.progress

    def begin(self, version: PolicyVersion, at: Moment) -> tuple[Command, ...]:
        if self._terms is None:
            raise InvariantError(f"v{version} is to be evaluated on no data")
        self._open = Evaluation(self._terms, version)
        self._begun_at = at.now
        return (Say("evaluation_begun", {"version": version}), *self._started())

    def drop(self) -> tuple[Command, ...]:
        """End the evaluation without a result."""
        evaluation, self._open = self._open, None
        if evaluation is None:
            return ()
        return tuple(CancelEvaluated(group_id) for group_id in evaluation.running)

    def on_finished(
        self, trajectory: Trajectory, *, attempt: int, at: Moment
    ) -> tuple[Command, ...]:
        if self._open is None:
            return ()
        self._open.on_finished(trajectory)
        return self._go_on(attempt, at)

    def on_failed(
        self, group_id: GroupId, failure: SampleFailed, *, attempt: int, at: Moment
    ) -> tuple[Command, ...]:
        if self._open is None:
            return ()
        self._open.on_failed(group_id)
        fields: dict[str, object] = {
            "group": group_id,
            "kind": failure.kind,
            "why": failure.message,
        }
        said = Say("sample_failed", fields, is_warning=True)
        return (said, *self._go_on(attempt, at))

    def _go_on(self, attempt: int, at: Moment) -> tuple[Command, ...]:
        evaluation = self._open
        if evaluation is None or not evaluation.is_done:
            return self._started()
        self._open = None
        self.just_done = evaluation.version
        self.last = EvaluationRecord(
            policy_version=evaluation.version,
            attempt=attempt,
            wall_time_ns=at.wall_ns,
            eval_s=at.now - self._begun_at,
            summary=evaluation.summary(),
        )
        fields: dict[str, object] = {
            "version": evaluation.version,
            "reward_mean": round(self.last.summary.reward_mean, 4),
            "num_failed": self.last.summary.num_failed,
            "eval_s": round(self.last.eval_s, 3),
        }
        done = Say("evaluation_done", fields)
        return (WriteEvaluation(self.last, evaluation.trajectories), done)

    def _started(self) -> tuple[Command, ...]:
        if self._open is None:
            return ()
        return tuple(StartEvaluated(group) for group in self._open.admit())
