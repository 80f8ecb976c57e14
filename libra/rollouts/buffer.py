"""Every trajectory from admission to training, accounted exactly once. Pure.

At any time enqueued + running + accepted + consumed + dropped = submitted, counted in trajectories.
A group whose sample fails leaves as a whole and its prompt is tried again; a prompt whose groups
keep failing is quarantined. Groups complete, and are consumed, in any order.
"""

from collections import Counter, deque
from collections.abc import Iterable
from math import lcm
from typing import TypeAlias

import msgspec

from libra.errors import DataError, InvariantError
from libra.ids import GroupId, PolicyVersion, PromptId
from libra.rollouts.accounts import BufferLimits, Counts, in_words, room
from libra.rollouts.group import AdmittedGroup, CompleteGroup, OpenGroup, PromptRef
from libra.rollouts.staleness import accepted_on_resume, staleness
from libra.rollouts.trajectory import NOT_THE_PROMPTS, FailureKind, Trajectory

PATIENCE = 10
"""A prompt whose groups always take their engine with them is given up after this many times as
many tries as one that fails by itself."""


class CancelGroup(msgspec.Struct, frozen=True, tag=True):
    """Stop whatever still runs for a group that is already accounted as dropped."""

    group_id: GroupId


class QuarantinePrompt(msgspec.Struct, frozen=True, tag=True):
    """The prompt failed `max_group_attempts` times, and not by an engine: it is left out now."""

    prompt_id: PromptId
    reason: str


BufferCommand: TypeAlias = CancelGroup | QuarantinePrompt


class MissingGroup(msgspec.Struct, frozen=True):
    """A group that a batch may be waiting for."""

    group_id: GroupId
    samples: tuple[int, ...]
    """By index: not finished."""

    silent_since: float | None
    """When the one that has been silent longest gave its last sign of life; None: none runs."""


class BufferState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps. Groups in progress become prompts to try again."""

    complete: tuple[CompleteGroup, ...]
    pending: tuple[AdmittedGroup, ...]
    quarantined: tuple[PromptId, ...]
    dropped: dict[str, int]


class RolloutBuffer:
    """The accounts of one run's trajectories."""

    def __init__(self, limits: BufferLimits) -> None:
        if limits.batch_size % limits.n_samples or limits.max_concurrent < limits.n_samples:
            raise InvariantError(f"groups never fit these limits: {limits}")
        self._limits = limits
        self._open: dict[GroupId, OpenGroup] = {}
        self._complete: dict[GroupId, CompleteGroup] = {}
        self._order_of: dict[GroupId, int] = {}
        """Of admission; groups that have left are forgotten with the next batch."""

        self._num_admitted = 0
        self._pending: deque[AdmittedGroup] = deque()
        self._quarantined: set[PromptId] = set()
        # Counted as they move: summing over the groups at every event would cost milliseconds.
        self._submitted = 0
        self._enqueued = 0
        self._running = 0
        self._accepted = 0
        self._consumed = 0
        self._written_off = 0
        self._dropped: Counter[str] = Counter()
        self._num_late_reports = 0
        self._num_flat_drops = 0

    @property
    def _num_groups(self) -> int:
        """In a batch."""
        return self._limits.batch_size // self._limits.n_samples

    @property
    def counts(self) -> Counts:
        return Counts(
            submitted=self._submitted,
            enqueued=self._enqueued,
            running=self._running,
            accepted=self._accepted,
            consumed=self._consumed,
            dropped=self._dropped.total(),
            written_off=self._written_off,
        )

    @property
    def dropped_by_reason(self) -> dict[str, int]:
        """Trajectories dropped, by failure kind, `stale`, `flat` or `sibling` (of a failed one)."""
        return dict(self._dropped)

    @property
    def num_late_reports(self) -> int:
        """Reports about groups that had left before."""
        return self._num_late_reports

    @property
    def quarantined(self) -> frozenset[PromptId]:
        return frozenset(self._quarantined)

    @property
    def num_complete(self) -> int:
        """Trajectories of complete groups, fresh or not."""
        return sum(len(g.trajectories) for g in self._complete.values())

    @property
    def num_groups_present(self) -> int:
        """Complete, in progress, or to be tried again."""
        return len(self._complete) + len(self._open) + len(self._pending)

    def oldest_wait(self) -> tuple[GroupId, float] | None:
        """The running group that has been silent longest, and since when."""
        waits = ((g.oldest_renewal_at, i) for i, g in self._open.items())
        oldest = min(((at, i) for at, i in waits if at is not None), default=None)
        return None if oldest is None else (oldest[1], oldest[0])

    def num_admissible(self, *, serving_version: PolicyVersion) -> int:
        """Whole groups that may be admitted now."""
        return room(self._limits, self.counts, serving_version) // self._limits.n_samples

    def admit_pending(self) -> AdmittedGroup | None:
        """Admit the oldest prompt that waits for another try, if there is one."""
        while self._pending:
            admitted = self._pending.popleft()
            if admitted.prompt.prompt_id not in self._quarantined:
                return self._admit(admitted)
        return None

    def admit(self, prompt: PromptRef) -> AdmittedGroup | None:
        """Admit a new visit of a prompt; None when the prompt is quarantined."""
        if prompt.prompt_id in self._quarantined:
            return None
        return self._admit(AdmittedGroup(prompt, 0, self._limits.n_samples))

    def check_prompts_left(self, num_prompts: int) -> None:
        """Raise DataError when every one of the dataset's prompts is quarantined."""
        if len(self._quarantined) >= num_prompts:
            raise DataError(
                f"all {num_prompts} prompts failed {self._limits.max_group_attempts} times each "
                f"({in_words(self._dropped)}); see the first failures in the log"
            )

    def on_started(self, group_id: GroupId, sample_index: int, *, now: float) -> None:
        group = self._find(group_id)
        if group is not None:
            group.start(sample_index, now=now)
            self._enqueued -= 1
            self._running += 1

    def on_progress(self, group_id: GroupId, sample_index: int, *, now: float) -> None:
        """A sign of life: the engine sent tokens, a tool answered."""
        group = self._open.get(group_id)
        if group is not None:
            group.renew(sample_index, now=now)

    def on_finished(self, trajectory: Trajectory) -> tuple[BufferCommand, ...]:
        """A scored trajectory. One that its group cannot hold is an InvariantError."""
        if trajectory.reward is None:
            raise InvariantError(f"{trajectory.trajectory_id} finished without a reward")
        group = self._find(trajectory.group_id)
        if group is None:
            return ()
        group.finish(trajectory)
        self._running -= 1
        self._accepted += 1
        complete = group.completed()
        if complete is not None:
            del self._open[trajectory.group_id]
            self._keep_or_drop_flat(complete)
        return ()

    def on_failed(
        self, group_id: GroupId, sample_index: int, kind: FailureKind, message: str
    ) -> tuple[BufferCommand, ...]:
        """One sample gave nothing: the whole group leaves, its prompt is tried again."""
        group = self._find(group_id)
        if group is None:
            return ()
        if not group.has(sample_index):
            raise InvariantError(f"{group.admitted.trajectory_id(sample_index)} reported twice")
        del self._open[group_id]
        self._enqueued -= group.num_enqueued
        self._running -= group.num_running
        self._accepted -= group.num_finished
        self._dropped[kind] += 1
        self._dropped["sibling"] += group.admitted.n_samples - 1
        return (CancelGroup(group_id), *self._try_again(group.admitted, kind, message))

    def on_tick(self, *, now: float) -> tuple[BufferCommand, ...]:
        """Fail the samples whose lease is over."""
        commands: list[BufferCommand] = []
        for group_id, group in list(self._open.items()):
            index = group.first_expired(now=now, lease_s=self._limits.lease_s)
            if index is not None:
                message = f"silent for more than {self._limits.lease_s} s"
                commands += self.on_failed(group_id, index, "lease", message)
        return tuple(commands)

    def drop_stale(self, *, version: PolicyVersion) -> int:
        """Drop complete groups too old for a policy at `version`; returns trajectories dropped."""
        bound = self._limits.max_head_offpolicyness
        stale = [
            group
            for group in self._complete.values()
            if staleness(consumed_at=version, oldest=group.oldest_version) > bound
        ]
        for group in stale:
            del self._complete[group.group_id]
            # Staleness is not the prompt's fault: it is tried again, but never quarantined for it.
            admitted = group.admitted
            if admitted.attempt + 1 < self._limits.max_group_attempts + admitted.num_excused:
                again = _next_attempt(admitted, admitted.num_excused)
                self._pending.append(
                    msgspec.structs.replace(again, num_stale=admitted.num_stale + 1)
                )
            self._accepted -= len(group.trajectories)
            self._dropped["stale"] += len(group.trajectories)
        return sum(len(group.trajectories) for group in stale)

    def num_batches(self, *, version: PolicyVersion) -> int:
        """Whole batches that complete groups make for policies at `version`, `version` + 1, ..."""
        waiting, count = self._versions_for(version), 0
        while len(waiting) >= self._num_groups:
            count += 1
            waiting = self._fresh(waiting[self._num_groups :], PolicyVersion(version + count))
        return count

    def has_batch(self, *, version: PolicyVersion) -> bool:
        return len(self._versions_for(version)) >= self._num_groups

    def _versions_for(self, version: PolicyVersion) -> list[PolicyVersion]:
        """Of the complete groups that a policy at `version` may train on, oldest first."""
        return self._fresh(sorted(it.oldest_version for it in self._complete.values()), version)

    def _fresh(self, oldest: list[PolicyVersion], version: PolicyVersion) -> list[PolicyVersion]:
        bound = self._limits.max_head_offpolicyness
        return [it for it in oldest if staleness(consumed_at=version, oldest=it) <= bound]

    def take_batch(self, *, version: PolicyVersion) -> tuple[CompleteGroup, ...] | None:
        """One batch of groups for a policy at `version`; None when there are too few.

        Oldest policy version first, then in order of admission.

        Groups that are too stale are dropped on the way.
        """
        self.drop_stale(version=version)
        if len(self._complete) < self._num_groups:
            return None
        return self._taken(self._num_groups)

    def take_partial(
        self, *, version: PolicyVersion, multiple: int
    ) -> tuple[CompleteGroup, ...] | None:
        """What there is of a batch, in a multiple of `multiple` trajectories; None when too little.

        What it lacks is never trained on: later batches are as large as ever.
        """
        self.drop_stale(version=version)
        step = lcm(multiple, self._limits.n_samples) // self._limits.n_samples
        num_groups = len(self._complete) // step * step
        if num_groups == 0:
            return None
        batch = self._taken(num_groups)
        self._written_off += self._limits.batch_size - sum(len(g.trajectories) for g in batch)
        return batch

    def missing(self) -> tuple[MissingGroup, ...]:
        """Groups in progress, with what they are not complete without."""
        return tuple(
            MissingGroup(group_id, group.unfinished, group.oldest_renewal_at)
            for group_id, group in self._open.items()
        )

    def ask_again(self, *, asked_before: float, now: float) -> dict[GroupId, tuple[int, ...]]:
        """Running samples, by group, that were asked for before that; they are asked for anew."""
        found = {
            group_id: group.ask_again(asked_before=asked_before, now=now)
            for group_id, group in self._open.items()
        }
        return {group_id: late for group_id, late in found.items() if late}

    def _taken(self, num_groups: int) -> tuple[CompleteGroup, ...]:
        # The order of the data within one version: which group finished first is left to chance.
        batch = sorted(
            self._complete.values(),
            key=lambda g: (g.oldest_version, self._order_of.get(g.group_id, -1)),
        )[:num_groups]
        for group in batch:
            del self._complete[group.group_id]
            self._accepted -= len(group.trajectories)
            self._consumed += len(group.trajectories)
        self._num_flat_drops = 0
        present = self._open.keys() | self._complete.keys()
        self._order_of = {i: order for i, order in self._order_of.items() if i in present}
        return tuple(batch)

    def state(self) -> BufferState:
        return BufferState(
            complete=tuple(self._complete.values()),
            pending=(*(g.admitted for g in self._open.values()), *self._pending),
            quarantined=tuple(sorted(self._quarantined)),
            dropped=dict(self._dropped),
        )

    @classmethod
    def restored(
        cls, limits: BufferLimits, state: BufferState, *, version: PolicyVersion
    ) -> "RolloutBuffer":
        """The buffer of a run that goes on at `version`.

        Groups of another size than `limits.n_samples`, or of policies newer than `version` (the run
        was rewound), are not used: their prompts are tried again.
        """
        buffer = cls(limits)
        buffer._consumed = accepted_on_resume(version, limits.batch_size)
        buffer._dropped = Counter(state.dropped)
        buffer._quarantined = set(state.quarantined)
        usable = [g for g in state.complete if _is_usable(g, limits, version)]
        buffer._complete = {g.group_id: g for g in usable}
        unusable = [g.admitted for g in state.complete if g.group_id not in buffer._complete]
        buffer._pending = deque(
            msgspec.structs.replace(g, n_samples=limits.n_samples)
            for g in (*unusable, *state.pending)
        )
        buffer._accepted = buffer.num_complete
        buffer._submitted = buffer._consumed + buffer._accepted + buffer._dropped.total()
        return buffer

    def _admit(self, admitted: AdmittedGroup) -> AdmittedGroup:
        if admitted.group_id in self._open or admitted.group_id in self._complete:
            raise InvariantError(f"{admitted.group_id} was admitted twice")
        self._open[admitted.group_id] = OpenGroup(admitted)
        self._order_of[admitted.group_id] = self._num_admitted
        self._num_admitted += 1
        self._submitted += admitted.n_samples
        self._enqueued += admitted.n_samples
        return admitted

    def _find(self, group_id: GroupId) -> OpenGroup | None:
        group = self._open.get(group_id)
        if group is None:
            self._num_late_reports += 1
        return group

    def _keep_or_drop_flat(self, group: CompleteGroup) -> None:
        if group.is_flat and self._num_flat_drops < self._limits.max_flat_drops:
            self._num_flat_drops += 1
            self._accepted -= len(group.trajectories)
            self._dropped["flat"] += len(group.trajectories)
        else:
            self._complete[group.group_id] = group

    def _try_again(
        self, failed: AdmittedGroup, kind: FailureKind, message: str
    ) -> Iterable[BufferCommand]:
        num_excused = failed.num_excused + (kind in NOT_THE_PROMPTS)
        num_tries, bound = failed.attempt + 1, self._limits.max_group_attempts
        num_blamed = num_tries - num_excused - failed.num_stale
        if num_blamed < bound and num_tries < PATIENCE * bound:
            self._pending.append(_next_attempt(failed, num_excused))
            return ()
        self._quarantined.add(failed.prompt.prompt_id)
        return (QuarantinePrompt(failed.prompt.prompt_id, f"{kind}: {message}"),)


def _next_attempt(admitted: AdmittedGroup, num_excused: int) -> AdmittedGroup:
    attempt = admitted.attempt + 1
    return msgspec.structs.replace(admitted, attempt=attempt, num_excused=num_excused)


def _is_usable(group: CompleteGroup, limits: BufferLimits, version: PolicyVersion) -> bool:
    newest = max(s.policy_version for t in group.trajectories for s in t.version_spans)
    return group.admitted.n_samples == limits.n_samples and newest <= version
