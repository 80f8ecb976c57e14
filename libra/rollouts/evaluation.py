"""One evaluation of one policy version: every row of the data, `eval_samples` times each. Pure.

A trajectory is a group of its own, so that one that fails is tried again alone. Seeds do not depend
on the version: two versions are asked with the same chances.
"""

from collections.abc import Sequence
from statistics import fmean

import msgspec

from libra.algorithms.pass_rate import pass_at_k
from libra.ids import GroupId, PolicyVersion, PromptId
from libra.rollouts.group import AdmittedGroup, PromptRef
from libra.rollouts.trajectory import Trajectory

PREFIX = "eval-"
"""Of the prompt ids; those of training begin with something else."""


class EvaluationTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change between evaluations."""

    rows: tuple[int, ...]
    num_samples: int
    """Per row."""

    max_concurrent: int
    """Trajectories in flight at a time."""

    max_attempts: int
    """Tries of one trajectory."""

    pass_reward: float


class EvaluationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one evaluation. Failed trajectories are in no mean."""

    num_rows: int
    num_trajectories: int
    num_failed: int
    """Trajectories that failed in every try."""

    reward_mean: float
    """avg@k: mean over rows of the mean over a row's trajectories; 0.0 when all have failed."""

    pass_at: dict[str, float]
    """pass@k over the rows with at least k trajectories, for k = 1, 2, 4, ... and eval_samples."""

    response_tokens_mean: float
    truncated_fraction: float


def is_evaluated(group_id: GroupId) -> bool:
    """Whether a group belongs to an evaluation."""
    return group_id.startswith(PREFIX)


class Evaluation:
    """Where every trajectory of one evaluation is: to be started, running, or ended once."""

    def __init__(self, terms: EvaluationTerms, version: PolicyVersion) -> None:
        self.version = version
        self._terms = terms
        samples = range(terms.num_samples)
        self._waiting = [_group(row, sample, 0) for row in terms.rows for sample in samples]
        # Taken from the end.
        self._waiting.reverse()
        self._running: dict[GroupId, AdmittedGroup] = {}
        self._finished: dict[int, list[Trajectory]] = {row: [] for row in terms.rows}
        self._num_failed = 0

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._running

    @property
    def progress(self) -> tuple[int, int]:
        """How many trajectories have ended, and of how many."""
        total = len(self._terms.rows) * self._terms.num_samples
        return total - len(self._waiting) - len(self._running), total

    @property
    def running(self) -> tuple[GroupId, ...]:
        return tuple(self._running)

    def admit(self) -> list[AdmittedGroup]:
        """Take what may be started now."""
        started = []
        while self._waiting and len(self._running) < self._terms.max_concurrent:
            group = self._waiting.pop()
            self._running[group.group_id] = group
            started.append(group)
        return started

    def on_finished(self, trajectory: Trajectory) -> None:
        """Count a trajectory; one that another version had a part in is tried again."""
        if any(span.policy_version != self.version for span in trajectory.version_spans):
            self.on_failed(trajectory.group_id)
            return
        group = self._running.pop(trajectory.group_id, None)
        if group is not None:
            self._finished[group.prompt.row].append(trajectory)

    def on_failed(self, group_id: GroupId) -> None:
        group = self._running.pop(group_id, None)
        if group is None:
            return
        if group.attempt + 1 < self._terms.max_attempts:
            sample = group.prompt.epoch
            self._waiting.append(_group(group.prompt.row, sample, group.attempt + 1))
        else:
            self._num_failed += 1

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Those that have finished, by row."""
        return tuple(t for of_row in self._finished.values() for t in of_row)

    def summary(self) -> EvaluationSummary:
        terms, trajectories = self._terms, self.trajectories
        rewards = [
            [t.reward or 0.0 for t in of_row] for of_row in self._finished.values() if of_row
        ]
        return EvaluationSummary(
            num_rows=len(terms.rows),
            num_trajectories=len(trajectories),
            num_failed=self._num_failed,
            reward_mean=_mean([fmean(of_row) for of_row in rewards]),
            pass_at={
                str(k): _mean([_pass_rate(r, k, terms.pass_reward) for r in rewards if len(r) >= k])
                for k in _ks(terms.num_samples)
            },
            response_tokens_mean=_mean([t.num_response_tokens for t in trajectories]),
            truncated_fraction=_mean([t.finish_reason == "length" for t in trajectories]),
        )


def _group(row: int, sample: int, attempt: int) -> AdmittedGroup:
    # The sample stands where training has the epoch: it makes identity and seed its own.
    return AdmittedGroup(PromptRef(PromptId(f"{PREFIX}{row}"), row, sample), attempt, 1)


def _pass_rate(rewards: Sequence[float], k: int, pass_reward: float) -> float:
    num_passed = sum(reward >= pass_reward for reward in rewards)
    return pass_at_k(len(rewards), num_passed, k)


def _ks(num_samples: int) -> list[int]:
    powers = [1 << exponent for exponent in range(num_samples.bit_length())]
    return sorted({*powers, num_samples})


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
