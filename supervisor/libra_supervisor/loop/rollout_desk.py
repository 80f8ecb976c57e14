"""Admission, accounts and batches of the rollout side. Pure.

Prompts come from the data's cursor, groups go to the runner, complete groups wait in the buffer
until a batch of them is fresh enough to train on.
"""

from typing import Protocol

import msgspec

from libra.errors import DataError
from libra.ids import GroupId, PolicyVersion
from libra.rollouts import buffer as accounts
from libra.rollouts.accounts import BufferLimits, Counts
from libra.rollouts.buffer import BufferCommand, MissingGroup, RolloutBuffer
from libra.rollouts.group import CompleteGroup, PromptRef
from libra.rollouts.trajectory import SampleFailed, Trajectory
from libra_supervisor.loop.commands import AskAgain, CancelGroup, Command, Say, StartGroup
from libra_supervisor.loop.rollout_state import RolloutState


class Cursor(Protocol):
    """Where the data stands; `libra.data.cursor.Cursor` is the real one."""

    @property
    def num_prompts(self) -> int:
        """Rows of the dataset."""

    def next(self) -> PromptRef | None:
        """The next visit, None when the wanted epochs are over."""

    def next_beyond(self) -> PromptRef:
        """The next visit, whether or not they are."""

    def dump(self) -> bytes:
        """What `restore` takes."""

    def restore(self, state: bytes) -> None: ...


class RolloutDesk:
    """The rollout side of one run; `rewind` puts it back to a checkpoint."""

    def __init__(self, limits: BufferLimits, cursor: Cursor) -> None:
        self._limits = limits
        self._cursor = cursor
        self._first_cursor = cursor.dump()
        self._buffer = RolloutBuffer(limits)
        self._is_open = False
        self._is_cursor_done = False

    @property
    def counts(self) -> Counts:
        return self._buffer.counts

    @property
    def num_complete(self) -> int:
        """Trajectories of complete groups."""
        return self._buffer.num_complete

    @property
    def dropped_by_reason(self) -> dict[str, int]:
        return self._buffer.dropped_by_reason

    @property
    def is_exhausted(self) -> bool:
        """True when the data is over, and of what it gave nothing is left to train on."""
        return self._is_cursor_done and self._is_idle and self.num_complete == 0

    @property
    def _is_idle(self) -> bool:
        counts = self._buffer.counts
        return counts.enqueued + counts.running == 0 and not self._buffer.state().pending

    def end_of_data(self) -> str:
        """What was left out of the data that is over; empty for nothing.

        Raises DataError when that is every prompt.
        """
        self._buffer.check_prompts_left(self._cursor.num_prompts)
        num_flat = self.dropped_by_reason.get("flat", 0) // self._limits.n_samples
        parts = {"prompts that kept failing": len(self._buffer.quarantined)}
        parts["groups of equal rewards"] = num_flat
        return ", ".join(f"{number} {what}" for what, number in parts.items() if number)

    def oldest_wait(self) -> tuple[GroupId, float] | None:
        return self._buffer.oldest_wait()

    def open(self) -> None:
        """Begin to admit: a committed version is being served."""
        self._is_open = True

    def close(self) -> None:
        """Admit nothing more; what runs goes on."""
        self._is_open = False

    def admit(self, serving_version: PolicyVersion) -> tuple[Command, ...]:
        """Start as many whole groups as staleness and concurrency allow."""
        if not self._is_open:
            return ()
        commands: list[Command] = []
        for _ in range(self._buffer.num_admissible(serving_version=serving_version)):
            group = self._buffer.admit_pending()
            while group is None:
                prompt = self._next_prompt()
                if prompt is None:
                    return tuple(commands)
                group = self._buffer.admit(prompt)
                if group is None:
                    self._buffer.check_prompts_left(self._cursor.num_prompts)
            commands.append(StartGroup(group))
        return tuple(commands)

    def _next_prompt(self) -> PromptRef | None:
        """The next visit, beyond the wanted ones where the last batch cannot be filled with them.

        Prompts that keep failing leave it incomplete.
        """
        prompt = self._cursor.next()
        if prompt is not None:
            return prompt
        self._is_cursor_done = True
        is_lacking = self._buffer.num_groups_present < self.num_groups_wanted
        return self._cursor.next_beyond() if is_lacking and self.num_complete else None

    def take_batch(self, trainer_version: PolicyVersion) -> tuple[CompleteGroup, ...] | None:
        """The batch that a trainer at `trainer_version` trains on next, or None."""
        return self._buffer.take_batch(version=trainer_version)

    def take_partial(
        self, trainer_version: PolicyVersion, *, multiple: int
    ) -> tuple[CompleteGroup, ...] | None:
        """What there is of that batch, in a multiple of `multiple` trajectories, or None."""
        return self._buffer.take_partial(version=trainer_version, multiple=multiple)

    def has_batch(self, trainer_version: PolicyVersion) -> bool:
        """Whether a trainer at `trainer_version` would get a batch."""
        return self._buffer.has_batch(version=trainer_version)

    def num_batches(self, trainer_version: PolicyVersion) -> int:
        """Batches that are there for steps from `trainer_version` on, if nothing more completes."""
        return self._buffer.num_batches(version=trainer_version)

    @property
    def num_groups_wanted(self) -> int:
        """Groups in a batch."""
        return self._limits.batch_size // self._limits.n_samples

    @property
    def num_groups_complete(self) -> int:
        return self.num_complete // self._limits.n_samples

    def missing(self) -> tuple[MissingGroup, ...]:
        """Groups in progress."""
        return self._buffer.missing()

    def ask_again(self, *, asked_before: float, now: float) -> tuple[Command, ...]:
        """Begin anew the running samples that were asked for before that."""
        late = self._buffer.ask_again(asked_before=asked_before, now=now)
        return tuple(AskAgain(group_id, indices) for group_id, indices in late.items())

    def on_started(self, group_id: GroupId, sample_index: int, *, now: float) -> None:
        self._buffer.on_started(group_id, sample_index, now=now)

    def on_progress(self, group_id: GroupId, sample_index: int, *, now: float) -> None:
        self._buffer.on_progress(group_id, sample_index, now=now)

    def on_finished(self, trajectory: Trajectory) -> tuple[Command, ...]:
        return _translated(self._buffer.on_finished(trajectory))

    def on_failed(
        self, group_id: GroupId, sample_index: int, failure: SampleFailed
    ) -> tuple[Command, ...]:
        said = Say(
            "sample_failed",
            {
                "group": group_id,
                "sample": sample_index,
                "kind": failure.kind,
                "why": failure.message,
            },
            is_warning=True,
        )
        ended = self._buffer.on_failed(group_id, sample_index, failure.kind, failure.message)
        return (said, *_translated(ended))

    def on_tick(self, *, now: float) -> tuple[Command, ...]:
        return _translated(self._buffer.on_tick(now=now))

    def state(self) -> RolloutState:
        """What a checkpoint keeps: frozen values, to be encoded off the loop by `encoded`."""
        return RolloutState(buffer=self._buffer.state(), cursor=self._cursor.dump())

    def rewind(self, state: bytes | None, version: PolicyVersion) -> None:
        """Go on from a checkpoint's state at `version`; None starts the data from its beginning.

        Raises DataError when the state is not one that `encoded` made.
        """
        self._is_open = False
        self._is_cursor_done = False
        if state is None:
            self._cursor.restore(self._first_cursor)
            self._buffer = RolloutBuffer(self._limits)
            return
        try:
            restored = msgspec.msgpack.decode(state, type=RolloutState)
        except msgspec.MsgspecError as error:
            raise DataError(f"the checkpoint's rollout state cannot be read: {error}") from error
        self._cursor.restore(restored.cursor)
        self._buffer = RolloutBuffer.restored(self._limits, restored.buffer, version=version)


def _translated(commands: tuple[BufferCommand, ...]) -> tuple[Command, ...]:
    return tuple(
        CancelGroup(command.group_id)
        if isinstance(command, accounts.CancelGroup)
        else Say(
            "prompt_quarantined",
            {"prompt": command.prompt_id, "why": command.reason},
            is_warning=True,
        )
        for command in commands
    )
