"""One prompt's `n_samples` trajectories, from admission until they are all finished."""

import msgspec

from libra.algorithms.advantage import is_flat
from libra.data.cursor import PromptRef
from libra.errors import InvariantError
from libra.ids import GroupId, PolicyVersion, TrajectoryId
from libra.rollouts.trajectory import Trajectory

__all__ = ["AdmittedGroup", "CompleteGroup", "OpenGroup", "PromptRef"]


class AdmittedGroup(msgspec.Struct, frozen=True):
    """Identity of a group: what to roll out, and which try this is."""

    prompt: PromptRef
    attempt: int
    """0 for the first try of this visit."""

    n_samples: int
    num_excused: int = 0
    """Tries before this one that failed by the engines' fault, not the prompt's."""

    num_stale: int = 0
    """Tries before this one that were finished, but too late to be trained on."""

    @property
    def group_id(self) -> GroupId:
        return GroupId(f"{self.prompt.prompt_id}/e{self.prompt.epoch}/a{self.attempt}")

    def trajectory_id(self, sample_index: int) -> TrajectoryId:
        return TrajectoryId(f"{self.group_id}/s{sample_index}")


def identity_error(trajectory: Trajectory, group: AdmittedGroup, sample_index: int) -> str | None:
    """What shows that the trajectory is none of this sample; None when it is."""
    expected = {
        "trajectory_id": group.trajectory_id(sample_index),
        "group_id": group.group_id,
        "prompt_id": group.prompt.prompt_id,
        "sample_index": sample_index,
    }
    for name, value in expected.items():
        if getattr(trajectory, name) != value:
            return f"{name} {getattr(trajectory, name)!r:.80}, not {value!r}"
    return None


class CompleteGroup(msgspec.Struct, frozen=True):
    """A group whose every trajectory is finished and scored, in the order of sample_index."""

    admitted: AdmittedGroup
    trajectories: tuple[Trajectory, ...]

    @property
    def group_id(self) -> GroupId:
        return self.admitted.group_id

    @property
    def oldest_version(self) -> PolicyVersion:
        return min(t.oldest_version for t in self.trajectories)

    @property
    def is_flat(self) -> bool:
        """All rewards as good as equal: no trajectory of the group has an advantage."""
        return is_flat([t.reward or 0.0 for t in self.trajectories])


class OpenGroup:
    """A group in progress. Each sample goes enqueued -> running -> finished, once."""

    def __init__(self, admitted: AdmittedGroup) -> None:
        self.admitted = admitted
        self._enqueued = set(range(admitted.n_samples))
        self._renewed_at: dict[int, float] = {}
        self._asked_at: dict[int, float] = {}
        """Of running samples: when they were started, or asked for anew."""

        self._finished: dict[int, Trajectory] = {}

    @property
    def num_enqueued(self) -> int:
        return len(self._enqueued)

    @property
    def num_running(self) -> int:
        return len(self._renewed_at)

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    @property
    def oldest_renewal_at(self) -> float | None:
        """When the running sample that has been silent longest last gave a sign of life."""
        return min(self._renewed_at.values(), default=None)

    def has(self, sample_index: int) -> bool:
        """Whether the sample may still report: it is not finished."""
        return sample_index in self._enqueued or sample_index in self._renewed_at

    def start(self, sample_index: int, *, now: float) -> None:
        if sample_index not in self._enqueued:
            raise InvariantError(f"{self.admitted.trajectory_id(sample_index)} was started twice")
        self._enqueued.remove(sample_index)
        self._renewed_at[sample_index] = self._asked_at[sample_index] = now

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Samples that the group is not complete without."""
        return tuple(i for i in range(self.admitted.n_samples) if i not in self._finished)

    def ask_again(self, *, asked_before: float, now: float) -> tuple[int, ...]:
        """The running samples that were asked for before that, which they count as again from now.

        What is finished stays.
        """
        late = tuple(sorted(i for i in self._renewed_at if self._asked_at[i] < asked_before))
        for sample_index in late:
            self._renewed_at[sample_index] = self._asked_at[sample_index] = now
        return late

    def renew(self, sample_index: int, *, now: float) -> None:
        if sample_index in self._renewed_at:
            self._renewed_at[sample_index] = now

    def first_expired(self, *, now: float, lease_s: float) -> int | None:
        """A running sample that has been silent for more than `lease_s`; None: there is none."""
        expired = (i for i, at in self._renewed_at.items() if now - at > lease_s)
        return next(expired, None)

    def finish(self, trajectory: Trajectory) -> None:
        if self._renewed_at.pop(trajectory.sample_index, None) is None:
            raise InvariantError(f"{trajectory.trajectory_id} finished but was not running")
        self._finished[trajectory.sample_index] = trajectory

    def completed(self) -> CompleteGroup | None:
        if self.num_finished < self.admitted.n_samples:
            return None
        ordered = (self._finished[index] for index in range(self.admitted.n_samples))
        return CompleteGroup(self.admitted, tuple(ordered))
