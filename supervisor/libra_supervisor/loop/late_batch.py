"""What follows when a batch does not come together in time. Pure."""

from libra.ids import PolicyVersion
from libra.pools.member import MemberState
from libra_supervisor.loop import commands
from libra_supervisor.loop.collection import in_words
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.progress import train_on
from libra_supervisor.loop.run_state import RunState

LOST_BATCH = 4
"""The exit code: what makes trajectories failed beyond its budget."""


def on_collection_tick(state: RunState, at: Moment) -> tuple[Command, ...]:
    """Ask again, train on what there is, or end the run."""
    collection = state.collection
    if state.cycle.is_hold_wanted or state.plans.change is not None:
        # The servers it waits for are being replaced, within limits of their own.
        collection.excuse(now=at.now)
        return ()
    due = collection.due(now=at.now) if state.cycle.phase is Phase.COLLECTING else None
    if due is None:
        return ()
    text, said = _missing(state, at)
    if due == "retry":
        asked_before = at.now - collection.terms.timeout_s
        return (said, *state.desk.ask_again(asked_before=asked_before, now=at.now))
    if collection.terms.allows_partial:
        version = PolicyVersion(state.cycle.step)
        groups = state.desk.take_partial(version, multiple=_multiple(state))
        if groups is not None:
            return (said, *train_on(state, groups, at))
        text = f"{text}; not even a part of the batch can be trained on"
    tries = collection.num_retries + 1
    reason = (
        f"the batch of step {state.cycle.step + 1} did not come together within "
        f"{tries} x {collection.terms.timeout_s:g} s: {text}"
    )
    return (said, commands.EndRun(LOST_BATCH, reason))


def _multiple(state: RunState) -> int:
    """Trajectories have to divide over the core's ranks and into micro-batches.

    With hybrid replicas shards are uneven anyhow.
    """
    train = state.plans.plan.train
    return train.dp * (train.micro_batch_size or state.collection.terms.micro_batch_size)


def _what_holds_groups(state: RunState) -> str:
    """A reload that is not answered keeps new groups back where versions may not lag behind."""
    loading = state.publication.waiting_for
    if loading:
        return f"since v{state.cycle.publishing} is not loaded by {', '.join(loading)}"
    return "" if state.pool.ids_in(MemberState.SERVING) else "since nothing serves"


def _missing(state: RunState, at: Moment) -> tuple[str, commands.SayMissing]:
    missing = state.desk.missing()
    text = in_words(
        missing,
        num_complete=state.desk.num_groups_complete,
        num_wanted=state.desk.num_groups_wanted,
        now=at.now,
        held_by=_what_holds_groups(state),
    )
    fields: dict[str, object] = {
        "step": state.cycle.step + 1,
        "retry": state.collection.num_retries,
        "why": text,
    }
    return text, commands.SayMissing(fields, tuple(it.group_id for it in missing))
