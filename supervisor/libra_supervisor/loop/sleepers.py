"""What happens to servers that sleep while training has their devices. Pure."""

from libra.ids import InstanceId
from libra.pools.member import MemberState
from libra_supervisor import events
from libra_supervisor.loop import commands
from libra_supervisor.loop.commands import Command
from libra_supervisor.loop.run_state import RunState


def on_child(event: events.ChildEvent) -> tuple[Command, ...]:
    """Its end is all that matters: its devices are others', so nothing is started for it."""
    if not isinstance(event, events.ChildExited):
        return ()
    instance_id = InstanceId(event.child_id)
    fields: dict[str, object] = {"instance": instance_id, "why": event.reason}
    # One that is ended on purpose is being retired already; to ask again is no harm.
    said = () if event.asked_for else (commands.Say("sleeper_ended", fields, is_warning=True),)
    return (*said, commands.RetireInstance(instance_id))


def on_woken(state: RunState, event: events.InstanceWoken) -> tuple[Command, ...]:
    """Ask what it holds, as of one that has come up: what follows is the same."""
    member = state.pool.get(event.instance_id)
    if member is None or member.state is not MemberState.WAKING:
        return ()
    if member.incarnation != event.incarnation:
        return ()
    return (commands.AskInstance(event.instance_id, event.incarnation),)
