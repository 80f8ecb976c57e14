"""Ranks, engines and a disk that answer in any order, driving Cycle.

The model is made of what was ordered and not yet answered. The cycle is right when it never orders
what cannot be done yet, and when a run that is stopped ends with everything settled and saved.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from libra.ids import PolicyVersion
from libra_supervisor.loop.cycle import Collect, Cycle, Finish, Limits, Phase, Publish, Save


class CycleMachine(RuleBasedStateMachine):
    @initialize(
        total=st.one_of(st.none(), st.integers(1, 9)),
        sync=st.integers(0, 3),
        save=st.integers(0, 3),
        patience=st.integers(0, 20),
    )
    def begin(self, total, sync, save, patience):
        # Disturbances are rare, else no run would get far.
        self.num_answers, self.patience, self.sync = 0, patience, sync
        self.cycle = Cycle(Limits(total_steps=total, sync_interval=sync, save_interval=save))
        self.now, self.trained, self.saved = 0.0, 0, {0}
        self.is_up, self.is_finished = False, False
        self.forget()

    def forget(self):
        """Nothing of what was ordered from a gang that is gone will be answered."""
        self.trainer_does: Publish | Collect | int | None = None
        self.publishing: int | None = None
        self.is_written = False
        self.saving: int | None = None
        self.published = -1

    def is_disturbed(self):
        return not self.is_finished and self.num_answers >= self.patience

    def disturb(self):
        self.patience = self.num_answers + 8

    def take(self, commands):
        self.num_answers += 1
        for command in commands:
            assert not self.is_finished
            match command:
                case Publish(version):
                    assert self.trainer_does is None, "the ranks do one thing after another"
                    assert self.publishing is None, "two publications at once"
                    assert version == self.trained
                    assert version > self.published
                    self.trainer_does, self.publishing = command, version
                    self.is_written, self.published = False, version
                case Collect(step):
                    assert self.trainer_does is None
                    assert step == self.trained + 1
                    is_due = self.sync and self.trained % self.sync == 0
                    assert not is_due or self.published == self.trained
                    self.trainer_does = command
                case Save(step):
                    assert self.saving is None, "two checkpoints at once"
                    assert step == self.trained
                    assert step not in self.saved
                    # A run that ends while it collects has nothing to collect for any more.
                    if isinstance(self.trainer_does, Collect):
                        self.trainer_does = None
                    assert self.trainer_does is None
                    self.saving = step
                case Finish():
                    assert not self.is_up or self.publishing is None
                    assert self.saving is None
                    assert not self.is_up or self.trained in self.saved
                    self.is_finished = True

    @precondition(lambda self: not self.is_up and not self.is_finished)
    @rule()
    def parts_come_up(self):
        self.trained = max(self.saved)
        self.is_up = True
        self.take(self.cycle.on_parts_ready(restored_step=self.trained, now=self.now))

    def weights_are_written(self):
        self.trainer_does, self.is_written = None, True
        self.take(self.cycle.on_exported(PolicyVersion(self.publishing), now=self.now))

    def every_engine_is_settled(self):
        version, self.publishing = self.publishing, None
        commands = self.cycle.on_settled(PolicyVersion(version), now=self.now)
        assert self.cycle.committed == version
        self.take(commands)

    def a_batch_is_taken(self):
        self.trainer_does = self.trainer_does.step
        self.take(self.cycle.on_batch_taken(self.trainer_does))

    def a_step_is_trained(self):
        self.trained, self.trainer_does = self.trainer_does, None
        self.take(self.cycle.on_trained(self.trained, now=self.now))

    def a_checkpoint_is_complete(self):
        step, self.saving = self.saving, None
        self.saved.add(step)
        self.take(self.cycle.on_saved(step, now=self.now))

    @precondition(lambda self: self.is_up and self.is_disturbed())
    @rule()
    def the_gang_is_lost(self):
        self.disturb()
        self.is_up = False
        self.forget()
        self.take(self.cycle.on_gang_lost())

    def time_passes(self):
        self.now += 1.0
        self.take(self.cycle.on_tick(now=self.now))

    @precondition(lambda self: self.cycle.phase is Phase.COLLECTING and self.is_disturbed())
    @rule()
    def the_data_is_over(self):
        self.disturb()
        self.take(self.cycle.on_data_exhausted(now=self.now))

    @precondition(lambda self: self.is_disturbed())
    @rule()
    def a_stop_is_asked_for(self):
        self.disturb()
        self.take(self.cycle.on_stop_requested("SIGTERM", now=self.now))

    def possible(self):
        """What may happen next without anything going wrong."""
        found = []
        if isinstance(self.trainer_does, Publish):
            found.append(self.weights_are_written)
        if isinstance(self.trainer_does, int):
            found.append(self.a_step_is_trained)
        if isinstance(self.trainer_does, Collect) and self.cycle.phase is Phase.COLLECTING:
            found.append(self.a_batch_is_taken)
        if self.publishing is not None and self.is_written:
            found.append(self.every_engine_is_settled)
        if self.saving is not None:
            found.append(self.a_checkpoint_is_complete)
        return found or [self.time_passes]

    @rule(k=st.integers(0, 99))
    def something_is_answered(self, k):
        found = self.possible()
        found[k % len(found)]()

    @rule(k=st.integers(0, 99))
    def something_else_is_answered(self, k):
        self.something_is_answered(k)

    @rule()
    def nothing_happens_for_a_while(self):
        self.time_passes()

    def teardown(self):
        if not hasattr(self, "cycle") or self.is_finished:
            return
        self.a_stop_is_asked_for()
        for _ in range(20):
            if self.is_finished:
                return
            self.possible()[0]()
        raise AssertionError(f"a stopped run hangs in {self.cycle.phase}")


TestCycle = CycleMachine.TestCase
TestCycle.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
