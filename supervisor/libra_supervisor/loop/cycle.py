"""The order of work of one run: collect, train, publish, save, again. Pure.

Version and step are one number: step k makes v(k). Every `on_<event>` returns the commands that
follow; what an event means in a phase that does not expect it is an InvariantError, except for
stop requests and the loss of the gang, which are legal at any time.

The phase is what the trainer does. A publication outlives the phase EXPORTING: once the weights are
written the trainer goes on, while the engines load them. At most one publication is open: before
the next export, and before the run ends, the trainer waits until it is settled.
"""

from enum import Enum
from typing import TypeAlias, assert_never

import msgspec

from libra.errors import InvariantError
from libra.ids import PolicyVersion


class Phase(Enum):
    STARTING = "starting"
    """Waiting for the gang to have its model and for the engines to answer."""

    SETTLING = "settling"
    """Waiting for the last engine's settled ACK of the version before, or of the last one."""

    EXPORTING = "exporting"
    COLLECTING = "collecting"
    TRAINING = "training"
    SAVING = "saving"
    """Waiting for a checkpoint: the last one of the run, or one that is slower than its interval.
    Every other checkpoint is written while the run goes on."""

    EVALUATING = "evaluating"
    """Waiting for the evaluation of the served version: before the next version is published, or
    before the run ends. Until then it goes on beside rollouts and training."""

    RESHAPING = "reshaping"
    """The gang is being started anew in another layout, from a checkpoint of this very step.
    Rollouts go on."""

    STOPPED = "stopped"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When the run ends and how often it publishes and saves."""

    total_steps: int | None
    sync_interval: int
    """0: never publish."""

    save_interval: int
    """0: save only when stopping."""

    eval_interval: int | None = None
    """None: no evaluation."""

    deadline: float | None = None
    """Instant at which the run stops by itself."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Have the ranks write the weights of `version`."""

    version: PolicyVersion


class Collect(msgspec.Struct, frozen=True, tag=True):
    """Gather the batch of `step`."""

    step: int


class Save(msgspec.Struct, frozen=True, tag=True):
    """Have the ranks write a checkpoint of `step`; what is commanded after it does not wait."""

    step: int


class Evaluate(msgspec.Struct, frozen=True, tag=True):
    """Evaluate `version`, which the engines serve until `on_evaluated`."""

    version: PolicyVersion


class DropEvaluation(msgspec.Struct, frozen=True, tag=True):
    """End the evaluation that is going on, without a result."""


class Reshape(msgspec.Struct, frozen=True, tag=True):
    """The newest step is saved: start the gang anew."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Nothing is left to do: end children, leave with exit code 0."""

    reason: str


Command: TypeAlias = Publish | Collect | Save | Evaluate | DropEvaluation | Reshape | Finish


class Cycle:
    """Where the run stands. One object per process life; a lost gang rewinds it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._phase = Phase.STARTING
        self._step = 0
        self._committed: PolicyVersion | None = None
        self._publishing: PolicyVersion | None = None
        self._saved_step: int | None = None
        self._saving_step: int | None = None
        self._evaluating: PolicyVersion | None = None
        self._evaluated: PolicyVersion | None = None
        self._stop_reason: str | None = None
        self._end_of_data: str | None = None
        self._is_hold_wanted = False
        self._is_reshape_wanted = False

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def step(self) -> int:
        """The newest trained step; the trainer's policy is v(step)."""
        return self._step

    @property
    def committed(self) -> PolicyVersion | None:
        """The version the engines serve; None until the first batch of reloads is settled."""
        return self._committed

    @property
    def saving_step(self) -> int | None:
        """The step whose checkpoint is being written; never more than one."""
        return self._saving_step

    @property
    def publishing(self) -> PolicyVersion | None:
        """The version whose publication is open, from the order to write it to the last ACK."""
        return self._publishing

    @property
    def held_version(self) -> PolicyVersion | None:
        """What the ranks hold and could publish now; None while they train or are not there."""
        if self._phase in (Phase.STARTING, Phase.TRAINING, Phase.RESHAPING, Phase.STOPPED):
            return None
        return PolicyVersion(self._step)

    @property
    def stop_reason(self) -> str | None:
        return self._stop_reason

    @property
    def is_hold_wanted(self) -> bool:
        """No batch is to be taken: the trainer shall stand at a step boundary."""
        return self._is_hold_wanted

    @property
    def is_held(self) -> bool:
        """The trainer stands at a step boundary, or is starting; nothing is published or saved."""
        is_idle = self._publishing is None and self._saving_step is None
        stands = self._phase in (Phase.COLLECTING, Phase.STARTING)
        return self._is_hold_wanted and is_idle and stands

    def hold(self) -> None:
        """Have the trainer stand at the next step boundary, until `release`."""
        self._is_hold_wanted = True

    def release(self) -> None:
        self._is_hold_wanted = self._is_reshape_wanted = False

    def on_reshape_wanted(self) -> tuple[Command, ...]:
        """Start the gang anew, from a checkpoint of the newest step, which is written if need be.

        Legal while the trainer is held, and again, for another layout, from then on.
        """
        if self._phase in (Phase.RESHAPING, Phase.STARTING):
            return (Reshape(),)
        if self._is_reshape_wanted or self._phase is Phase.STOPPED:
            return ()
        if not self.is_held:
            raise InvariantError(f"the trainer is not held, the run is {self._phase.value}")
        if self._step in (0, self._saved_step):
            self._phase = Phase.RESHAPING
            return (Reshape(),)
        self._is_reshape_wanted = True
        self._saving_step = self._step
        self._phase = Phase.SAVING
        return (Save(self._step),)

    def on_reshaped(self, *, now: float) -> tuple[Command, ...]:
        """The gang has its model again, at the step it had before."""
        self._expect(Phase.RESHAPING)
        return self._go_on(now)

    def on_parts_ready(self, *, restored_step: int, now: float) -> tuple[Command, ...]:
        """The gang holds v(restored_step) and enough engines answer: publish that version first."""
        self._expect(Phase.STARTING)
        self._step = restored_step
        self._saved_step = restored_step or None
        self._saving_step = None
        if self._limits.sync_interval == 0:
            # Engines keep the base model for ever, which only step 0 can call its own policy.
            self._committed = PolicyVersion(0)
            return self._go_on(now)
        return self._publish()

    def on_exported(self, version: PolicyVersion, *, now: float) -> tuple[Command, ...]:
        """The weights of `version` are written: the trainer is free, the engines begin."""
        self._expect(Phase.EXPORTING)
        self._check_version(version)
        return self._save_or_go_on(now)

    def on_settled(self, version: PolicyVersion, *, now: float) -> tuple[Command, ...]:
        """Every engine has proved `version`, or was settled by rule; it is committed."""
        if self._phase is Phase.EXPORTING:
            raise InvariantError(f"v{version} is settled while it is still written")
        self._check_version(version)
        self._committed, self._publishing = version, None
        begun = self._evaluate(now)
        if self._phase is not Phase.SETTLING:
            return begun
        if self._is_publication_owed():
            return (*begun, *self._publish_when_evaluated(now))
        return (*begun, *self._save_or_go_on(now))

    def on_nobody_serves(self) -> tuple[Command, ...]:
        """No engine has the served version or can be given it: publish what the trainer holds.

        That may be the served version: ranks that were started anew have offered nothing yet.
        """
        is_waiting = self._phase in (Phase.COLLECTING, Phase.EVALUATING)
        if not is_waiting or self._publishing is not None:
            return ()
        dropped = self._drop_evaluation()
        if dropped or self._committed != self._step:
            self._evaluated = None
        return (*dropped, *self._publish())

    def on_batch_taken(self, step: int) -> tuple[Command, ...]:
        """The batch of `step` is on its way to the ranks."""
        self._expect(Phase.COLLECTING)
        if step != self._step + 1:
            raise InvariantError(f"batch of step {step} taken while {self._step + 1} is due")
        self._phase = Phase.TRAINING
        return ()

    def on_trained(self, step: int, *, now: float) -> tuple[Command, ...]:
        self._expect(Phase.TRAINING)
        if step != self._step + 1:
            raise InvariantError(f"step {step} trained while {self._step + 1} is due")
        self._step = step
        if not self._is_sync_due():
            return self._save_or_go_on(now)
        if self._publishing is None:
            return self._publish_when_evaluated(now)
        self._phase = Phase.SETTLING
        return ()

    def on_evaluated(self, version: PolicyVersion, *, now: float) -> tuple[Command, ...]:
        """The evaluation of `version` has its result."""
        if version != self._evaluating:
            raise InvariantError(f"v{version} was evaluated, asked for was {self._evaluating}")
        self._evaluating = None
        if self._phase is not Phase.EVALUATING:
            return ()
        return self._publish() if self._is_publication_owed() else self._go_on(now)

    def on_saved(self, step: int, *, now: float) -> tuple[Command, ...]:
        """The checkpoint of `step` is complete. Legal in any phase while it is being written."""
        if step != self._saving_step:
            raise InvariantError(f"step {step} was saved, asked for was {self._saving_step}")
        self._saving_step = None
        self._saved_step = step
        if self._phase is not Phase.SAVING:
            return ()
        if self._is_reshape_wanted:
            self._is_reshape_wanted = False
            self._phase = Phase.RESHAPING
            return (Reshape(),)
        return self._save_or_go_on(now)

    def on_data_exhausted(self, left_out: str = "", *, now: float) -> tuple[Command, ...]:
        """No further batch can ever be filled: the wanted epochs are over.

        `left_out` says what of them was not trained on.
        """
        self._end_of_data = "every epoch is done" + (f"; left out: {left_out}" if left_out else "")
        return self._wake(now)

    def on_stop_requested(self, reason: str, *, now: float) -> tuple[Command, ...]:
        """Finish what is being trained or published, save, stop. Later requests change nothing."""
        if self._stop_reason is not None:
            return ()
        self._stop_reason = reason
        return self._wake(now)

    def on_tick(self, *, now: float) -> tuple[Command, ...]:
        return self._wake(now)

    def on_gang_lost(self) -> tuple[Command, ...]:
        """Back to the start; `on_parts_ready` says from which step the next gang goes on."""
        self._publishing = None
        if self._phase is not Phase.STOPPED:
            self._phase = Phase.STARTING
        self._saving_step = None
        self._is_reshape_wanted = False
        # Its engines go back to the checkpoint's version, which is evaluated again.
        self._evaluating = self._evaluated = None
        return ()

    def next_batch_step(self, *, now: float) -> int | None:
        """The step whose batch is taken next; None when the run ends before one is."""
        is_training = self._phase is Phase.TRAINING
        step = self._step + (2 if is_training else 1)
        last = self._limits.total_steps
        is_beyond = last is not None and step > last
        return None if is_beyond or self.end_reason(now=now) is not None else step

    @property
    def num_steps_until_evaluation(self) -> int | None:
        """From the newest trained step to the next version that is evaluated; None: none is."""
        interval = self._limits.eval_interval
        return None if interval is None else interval - self._step % interval

    def end_reason(self, *, now: float) -> str | None:
        """Why the run is over after what is in progress; None while it should go on."""
        limits = self._limits
        if self._stop_reason is not None:
            return self._stop_reason
        if limits.total_steps is not None and self._step >= limits.total_steps:
            return f"total_steps {limits.total_steps} reached"
        if self._end_of_data is not None:
            return self._end_of_data
        if limits.deadline is not None and now >= limits.deadline:
            return "max_run_s reached"
        return None

    def _wake(self, now: float) -> tuple[Command, ...]:
        """React to an end that came up while nothing but waiting is going on."""
        match self._phase:
            case Phase.COLLECTING:
                return self._save_or_go_on(now) if self.end_reason(now=now) else ()
            case Phase.STARTING:
                if self._stop_reason is None:
                    return ()
                self._phase = Phase.STOPPED
                return (Finish(self._stop_reason),)
            case Phase.EVALUATING:
                if self._may_evaluate(now):
                    return ()
                dropped = self._drop_evaluation()
                if self._is_publication_owed():
                    return (*dropped, *self._publish())
                return (*dropped, *self._go_on(now))
            case (
                Phase.EXPORTING
                | Phase.SETTLING
                | Phase.TRAINING
                | Phase.SAVING
                | Phase.RESHAPING
                | Phase.STOPPED
            ):
                return ()
            case _:
                assert_never(self._phase)

    def _publish(self) -> tuple[Command, ...]:
        self._phase = Phase.EXPORTING
        self._publishing = PolicyVersion(self._step)
        return (Publish(self._publishing),)

    def _publish_when_evaluated(self, now: float) -> tuple[Command, ...]:
        if self._evaluating is None:
            return self._publish()
        if not self._may_evaluate(now):
            return (*self._drop_evaluation(), *self._publish())
        self._phase = Phase.EVALUATING
        return ()

    def _evaluate(self, now: float) -> tuple[Command, ...]:
        """Begin an evaluation of the version just committed, if one is due."""
        interval, version = self._limits.eval_interval, self._committed
        if interval is None or version is None or not self._may_evaluate(now):
            return ()
        done = self._evaluated
        is_due = done is None or version // interval > done // interval
        is_over = self.end_reason(now=now) is not None
        is_last = version != done and is_over and not self._is_publication_owed()
        if not (is_due or is_last):
            return ()
        self._evaluating = self._evaluated = version
        return (Evaluate(version),)

    def _may_evaluate(self, now: float) -> bool:
        """Whether there is time for it: a stop or the deadline leaves none."""
        is_late = self._limits.deadline is not None and now >= self._limits.deadline
        return self._stop_reason is None and not is_late

    def _drop_evaluation(self) -> tuple[Command, ...]:
        if self._evaluating is None:
            return ()
        self._evaluating = None
        return (DropEvaluation(),)

    def _is_publication_owed(self) -> bool:
        return self._is_sync_due() and self._committed != self._step

    def _save_or_go_on(self, now: float) -> tuple[Command, ...]:
        is_over, is_due = self.end_reason(now=now) is not None, self._is_save_due(now)
        if self._saving_step is not None and (is_over or is_due):
            self._phase = Phase.SAVING
            return ()
        if not is_due:
            return self._go_on(now)
        self._saving_step = self._step
        if is_over:
            self._phase = Phase.SAVING
            return (Save(self._step),)
        return (Save(self._step), *self._go_on(now))

    def _go_on(self, now: float) -> tuple[Command, ...]:
        reason = self.end_reason(now=now)
        if reason is not None and self._publishing is not None:
            self._phase = Phase.SETTLING
            return ()
        if reason is not None:
            if self._evaluating is not None and self._may_evaluate(now):
                self._phase = Phase.EVALUATING
                return ()
            dropped = self._drop_evaluation()
            self._phase = Phase.STOPPED
            return (*dropped, Finish(reason))
        self._phase = Phase.COLLECTING
        return (Collect(self._step + 1),)

    def _is_sync_due(self) -> bool:
        interval = self._limits.sync_interval
        return interval > 0 and self._step % interval == 0

    def _is_save_due(self, now: float) -> bool:
        if self._step in (0, self._saved_step, self._saving_step):
            return False
        interval = self._limits.save_interval
        is_interval_over = interval > 0 and self._step % interval == 0
        return is_interval_over or self.end_reason(now=now) is not None

    def _expect(self, phase: Phase) -> None:
        if self._phase is not phase:
            raise InvariantError(f"expected phase {phase.value}, the run is {self._phase.value}")

    def _check_version(self, version: PolicyVersion) -> None:
        if version != self._publishing:
            raise InvariantError(f"v{version} came up while v{self._publishing} is published")
