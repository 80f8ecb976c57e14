"""Event -> the machines it concerns -> commands. Pure; the loop is its only caller.

`Control` is the whole control state of a run. Nothing else may change the machines it holds. What
an event means is said by its family: `instance_life`, `gang_life`, `plan_life`, `samples`,
`requests`.
"""

from libra_supervisor import events
from libra_supervisor.loop import (
    commands,
    gang_life,
    hybrid_life,
    instance_life,
    node_life,
    plan_life,
    requests,
    samples,
    sleepers,
)
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.progress import proceed
from libra_supervisor.loop.run_state import RunState

TRAINER = "trainer"


class Control(RunState):
    """Every machine of one run."""

    def on_event(self, event: events.Event, at: Moment) -> tuple[Command, ...]:
        """What follows from `event`; nothing any more once the run is ending."""
        if self.is_ending:
            return ()
        done = (*self._dispatch(event, at), *proceed(self, at))
        self._note_groups(done, at)
        return self._until_end(done, at)

    def _dispatch(  # noqa: C901, PLR0911, PLR0912 - a table
        self, event: events.Event, at: Moment
    ) -> tuple[Command, ...]:
        match event:
            case events.RankSaid(attempt, said):
                return gang_life.on_rank_said(self, said, at) if attempt == self.attempt else ()
            case (
                events.CheckpointChosen()
                | events.GangReady()
                | events.ProbeJudged()
                | events.GangLost()
                | events.GangGaveUp()
            ):
                return gang_life.on_gang(self, event, at)
            case (
                events.InstanceAnswered()
                | events.InstanceDoubted()
                | events.ReloadAnswered()
                | events.ExportChecked()
            ):
                return instance_life.on_engines(self, event, at)
            case (
                events.SampleStarted()
                | events.SampleProgressed()
                | events.SampleFinished()
                | events.SampleGaveUp()
            ):
                return samples.on_sample(self, event, at)
            case (
                events.ReconfigurationWanted()
                | events.ReconfigurationEnded()
                | events.HybridWarmed()
                | events.HybridJoined()
                | events.HybridLost()
                | events.HybridLeft()
            ):
                return plan_life.on_plan(self, event, at)
            case events.ReplicaReady() | events.ReplicaSaid() | events.ReplicaDown():
                return hybrid_life.on_replica(self, event, at)
            case events.InstanceWoken():
                return sleepers.on_woken(self, event)
            case (
                events.InstanceDrained()
                | events.InstanceWarmed()
                | events.InstanceAsleep()
                | events.InstanceRetired()
            ):
                return plan_life.on_instance(self, event, at)
            case events.NodeJoined() | events.NodeLost():
                node_life.on_node(self, event, at)
                return ()
            case (
                events.StopRequested()
                | events.DrainRequested()
                | events.RestartRequested()
                | events.ReloadRequested()
                | events.Ticked()
            ):
                return requests.on_outside(self, event, at)
            case _ if event.child_id == TRAINER:
                # The gang reports its own life, rank by rank and attempt by attempt.
                return ()
            case _:
                return instance_life.on_child(self, event, at)

    def _note_groups(self, done: tuple[Command, ...], at: Moment) -> None:
        for command in done:
            if isinstance(command, commands.StartGroup):
                self.book.rollouts.on_opened(command.group.group_id, command.group.n_samples)
            elif isinstance(command, commands.CancelGroup):
                self.book.rollouts.on_cancelled(command.group_id, now=at.now)

    def _until_end(self, done: tuple[Command, ...], at: Moment) -> tuple[Command, ...]:
        for index, command in enumerate(done):
            if isinstance(command, commands.EndRun | commands.ChangePlan):
                self.is_ending = True
                return (*done[:index], *self.publication.on_run_ended(at=at), command)
        return done
