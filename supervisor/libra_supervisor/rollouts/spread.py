"""Which node makes which samples, and what of their words the loop gets to hear. Pure.

A group goes whole to the able node with the fewest unfinished samples, of equal ones to the lowest
rank. What a lost node has not finished is given to others, under a new job. Each sample begins once
and ends once for whoever listens, whatever was made twice; see `libra.wire.node_rollouts`.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from libra.errors import InvariantError
from libra.ids import GroupId, NodeRank
from libra.rollouts.group import AdmittedGroup
from libra.rollouts.trajectory import SampleFailed, Trajectory
from libra_supervisor.events import (
    SampleFinished,
    SampleGaveUp,
    SampleProgressed,
    SampleStarted,
)


class Make(msgspec.Struct, frozen=True):
    node: NodeRank
    job: int
    group: AdmittedGroup
    samples: tuple[int, ...]


class Again(msgspec.Struct, frozen=True):
    node: NodeRank
    job: int
    samples: tuple[int, ...]
    group_id: GroupId


class Drop(msgspec.Struct, frozen=True):
    node: NodeRank
    job: int
    group_id: GroupId


SpreadCommand: TypeAlias = Make | Again | Drop


class OpenJob(msgspec.Struct):
    """A group in progress, at the node that makes the rest of it."""

    group: AdmittedGroup
    node: NodeRank
    number: int
    unfinished: set[int]
    begun: set[int]
    """Of all samples of the group, at whichever node."""


class Spread:
    """All groups in progress. `own` makes them too and is never away."""

    def __init__(self, own: NodeRank, *, first_job: int = 1) -> None:
        """`first_job` and those after it must not have been used by a leader before."""
        self._own = own
        self._able: set[NodeRank] = {own}
        self._silent: set[NodeRank] = set()
        self._next_job = first_job
        self._job_of: dict[GroupId, OpenJob] = {}
        self._by_number: dict[int, OpenJob] = {}
        self._num_unfinished: dict[NodeRank, int] = {own: 0}

    # What is asked for

    def start(self, group: AdmittedGroup) -> Make:
        """Give a new group to a node."""
        if group.group_id in self._job_of:
            raise InvariantError(f"{group.group_id} was started twice")
        return self._given(group, frozenset(range(group.n_samples)), frozenset())

    def cancel(self, group_id: GroupId) -> tuple[Drop, ...]:
        """From now on nothing more is told of the group; one of the same name may be started."""
        job = self._job_of.get(group_id)
        if job is None:
            return ()
        self._forget(job)
        return (Drop(job.node, job.number, group_id),)

    def cancel_all(self) -> tuple[Drop, ...]:
        return tuple(drop for group_id in tuple(self._job_of) for drop in self.cancel(group_id))

    def ask_again(self, group_id: GroupId, samples: Sequence[int]) -> tuple[Again, ...]:
        job = self._job_of.get(group_id)
        wanted = () if job is None else tuple(i for i in samples if i in job.unfinished)
        return () if job is None or not wanted else (Again(job.node, job.number, wanted, group_id),)

    # Nodes

    def on_able(self, node: NodeRank) -> None:
        """It takes part from now on."""
        self._able.add(node)
        self._silent.discard(node)

    def on_silent(self, node: NodeRank) -> None:
        """It gets nothing new; what it has may still come."""
        self._silent.add(node)

    def on_heard(self, node: NodeRank) -> None:
        self._silent.discard(node)

    def on_gone(self, node: NodeRank) -> tuple[Make, ...]:
        """It makes nothing any more; what it had goes to others."""
        if node == self._own:
            raise InvariantError("this node does not leave its own run")
        self._able.discard(node)
        lost = [job for job in self._job_of.values() if job.node == node]
        return tuple(self._given_anew(job) for job in lost)

    # What jobs say

    def on_begun(
        self, node: NodeRank, number: int, sample: int
    ) -> SampleStarted | SampleProgressed | None:
        """A sample that begins a second time is a sign of life of the first."""
        job = self._speaking(node, number, sample)
        if job is None:
            return None
        if sample in job.begun:
            return SampleProgressed(job.group.group_id, sample)
        job.begun.add(sample)
        return SampleStarted(job.group.group_id, sample)

    def on_alive(self, node: NodeRank, number: int, sample: int) -> SampleProgressed | None:
        job = self._speaking(node, number, sample)
        return None if job is None else SampleProgressed(job.group.group_id, sample)

    def on_failed(
        self, node: NodeRank, number: int, sample: int, failure: SampleFailed
    ) -> SampleGaveUp | None:
        job = self._speaking(node, number, sample)
        if job is None:
            return None
        self._end(job, sample)
        return SampleGaveUp(job.group.group_id, sample, failure)

    def on_finished(
        self, node: NodeRank, number: int, trajectory: Trajectory
    ) -> SampleFinished | None:
        job = self._speaking(node, number, trajectory.sample_index)
        if job is None or trajectory.group_id != job.group.group_id:
            return None
        self._end(job, trajectory.sample_index)
        return SampleFinished(trajectory)

    # Views

    def is_open(self, node: NodeRank, number: int, sample: int) -> bool:
        """Whether an end of this sample would count."""
        return self._speaking(node, number, sample) is not None

    def group_of(self, node: NodeRank, number: int, sample: int) -> AdmittedGroup | None:
        """Whose sample it is; None when an end of it would not count."""
        job = self._speaking(node, number, sample)
        return None if job is None else job.group

    def number_of(self, group_id: GroupId) -> int | None:
        """The group's job; None when it is not in progress."""
        job = self._job_of.get(group_id)
        return None if job is None else job.number

    def node_of(self, group_id: GroupId) -> NodeRank | None:
        job = self._job_of.get(group_id)
        return None if job is None else job.node

    def num_unfinished(self, node: NodeRank) -> int:
        """Samples that the node has to make."""
        return self._num_unfinished.get(node, 0)

    def is_able(self, node: NodeRank) -> bool:
        return node in self._able

    # Parts

    def _given(self, group: AdmittedGroup, unfinished: Iterable[int], begun: Iterable[int]) -> Make:
        node = min(self._able - self._silent, key=lambda it: (self.num_unfinished(it), it))
        number = self._next_job
        self._next_job += 1
        job = OpenJob(group, node, number, set(unfinished), set(begun))
        self._job_of[group.group_id] = self._by_number[number] = job
        self._num_unfinished[node] = self.num_unfinished(node) + len(job.unfinished)
        return Make(node, number, group, tuple(sorted(job.unfinished)))

    def _given_anew(self, job: OpenJob) -> Make:
        self._forget(job)
        return self._given(job.group, job.unfinished, job.begun)

    def _speaking(self, node: NodeRank, number: int, sample: int) -> OpenJob | None:
        job = self._by_number.get(number)
        is_open = job is not None and job.node == node and sample in job.unfinished
        return job if is_open else None

    def _end(self, job: OpenJob, sample: int) -> None:
        job.unfinished.remove(sample)
        self._num_unfinished[job.node] -= 1
        if not job.unfinished:
            self._forget(job)

    def _forget(self, job: OpenJob) -> None:
        del self._job_of[job.group.group_id]
        del self._by_number[job.number]
        self._num_unfinished[job.node] -= len(job.unfinished)
