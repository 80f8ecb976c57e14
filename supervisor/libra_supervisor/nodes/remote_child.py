"""Children on another node, as supervision takes those of this one.

A lost node's children are gone with it: the node let go of them before it counted as lost.
"""

from typing import Final

import anyio
import msgspec

from libra.errors import ChildError, NodeAwayError, PeerError
from libra.ids import ChildId, Incarnation
from libra.tracing.log import get_log
from libra.wire import node as wire
from libra.wire.node import NodeCommand
from libra_supervisor.nodes.remote import RemoteNode
from libra_supervisor.process.child import ExitStatus
from libra_supervisor.process.identity import ProcessIdentity, ProcessRow
from libra_supervisor.process.spec import ProcessSpec
from libra_supervisor.process.tree import StopDeadlines, TreeEnded

_SLACK_S: Final = 60.0

_log = get_log()


class RemoteTree:
    """`EndableTree` of a child on another node."""

    def __init__(self, node: RemoteNode, incarnation: Incarnation) -> None:
        self._node = node
        self._incarnation = incarnation
        self.lost_with = ""
        """The loss of its node, in words."""

    def add_root(self, identity: ProcessIdentity) -> None:
        """The follower adds the ranks that link there."""

    async def observe(self, *, max_age_s: float = 0.0) -> None:
        """The follower looks by itself."""

    async def end(self, deadlines: StopDeadlines, *, hurry: anyio.Event | None = None) -> TreeEnded:
        """With its node lost it is gone: the node let go of it before it counted as lost."""
        async with anyio.create_task_group() as tasks:
            if hurry is not None:
                tasks.start_soon(self._hurry_when, hurry)
            gone = await self._ended(deadlines)
            tasks.cancel_scope.cancel()
        return gone

    async def _ended(self, deadlines: StopDeadlines) -> TreeEnded:
        def command(call: int) -> NodeCommand:
            return wire.End(
                call=call,
                incarnation=self._incarnation,
                term_grace_s=deadlines.term_grace_s,
                kill_wait_s=deadlines.kill_wait_s,
                hurried_grace_s=deadlines.hurried_grace_s,
            )

        if self.lost_with:
            return self._gone_with_node()
        why = "its node does not answer"
        try:
            # A member answers in time or is lost; this is for a leader that watches no more.
            with anyio.move_on_after(deadlines.term_grace_s + deadlines.kill_wait_s + _SLACK_S):
                return _tree_ended(await self._node.ask(wire.TreeGone, command))
        except NodeAwayError as error:
            self.lost_with = self.lost_with or str(error)
            return self._gone_with_node()
        except PeerError as error:
            why = str(error)
        _log.warning("remote_child_let_go", incarnation=self._incarnation, why=why)
        return _LOST

    def _gone_with_node(self) -> TreeEnded:
        return msgspec.structs.replace(_LOST, lost_with=self.lost_with)

    async def _hurry_when(self, hurry: anyio.Event) -> None:
        await hurry.wait()
        if not self.lost_with:
            self._node.say_if_there(wire.Hurry(self._incarnation))


class RemoteChild:
    """`RunningChild` on another node."""

    def __init__(
        self,
        node: RemoteNode,
        *,
        child_id: ChildId,
        incarnation: Incarnation,
        identity: ProcessIdentity,
    ) -> None:
        self.child_id = child_id
        self.incarnation = incarnation
        self.identity = identity
        self.tree = RemoteTree(node, incarnation)
        self._node = node
        self._ended = anyio.Event()
        self._status = ExitStatus(None, None)

    async def wait(self) -> ExitStatus:
        await self._ended.wait()
        return self._status

    async def last_lines(self, num_lines: int) -> tuple[str, ...]:
        try:
            lines = await self._node.ask(
                wire.Lines, lambda call: wire.Tail(call, self.incarnation, num_lines)
            )
        except PeerError:
            return ()
        return lines.lines

    def attach_rank(self, rank: int, out_fd: int, err_fd: int) -> None:
        """Never called: a rank's pipes end on its own node, and the follower attaches them."""

    def reap(self) -> None:
        self._node.forget(self.incarnation)

    def on_ended(self, status: ExitStatus) -> None:
        self._status = status
        self._ended.set()

    def on_node_lost(self, why: str) -> None:
        self.tree.lost_with = why
        self.on_ended(ExitStatus(None, None, why=why))


class RemoteSpawner:
    """`Spawner` for the children on one follower."""

    def __init__(self, node: RemoteNode) -> None:
        self._node = node

    async def spawn(self, spec: ProcessSpec, incarnation: Incarnation) -> RemoteChild:
        def command(call: int) -> NodeCommand:
            return wire.Start(
                call=call,
                child_id=spec.child_id,
                incarnation=incarnation,
                argv=spec.argv,
                env=spec.env,
                cwd=spec.cwd,
                log_path=spec.log_path,
                cpu_cores=spec.limits.cpu_cores,
                is_bound=spec.is_bound_to_supervisor,
            )

        try:
            # Shielded as a local start is: what was started has to be known.
            with anyio.CancelScope(shield=True):  # bounded by the loss of the node
                started = await self._node.ask(wire.Started, command)
        except PeerError as error:
            raise ChildError(f"{spec.child_id} does not start: {error}") from error
        return self._child(spec.child_id, incarnation, started)

    async def adopt(
        self, child_id: ChildId, identity: ProcessIdentity, incarnation: Incarnation
    ) -> RemoteChild | None:
        """Waits for the node as long as its servers wait for a leader."""

        def command(call: int) -> NodeCommand:
            return wire.Adopt(call, child_id, incarnation, identity.pid, identity.start_ticks)

        try:
            await self._node.until_member()
            started = await self._node.ask(wire.Started, command)
        except PeerError as error:
            _log.info("child_not_adopted", child=child_id, why=str(error))
            return None
        if started.boot_id != identity.boot_id:
            _log.info("child_not_adopted", child=child_id, why="its machine is another one")
            return None
        return self._child(child_id, incarnation, started)

    async def clear(self, child_id: ChildId, kill_wait_s: float) -> TreeEnded:
        if not self._node.is_member:
            # Its first command ends what it has.
            return _LOST
        try:
            gone = await self._node.ask(
                wire.TreeGone, lambda call: wire.Clear(call, child_id, kill_wait_s)
            )
        except PeerError:
            return _LOST
        return _tree_ended(gone)

    def _child(
        self, child_id: ChildId, incarnation: Incarnation, started: wire.Started
    ) -> RemoteChild:
        identity = ProcessIdentity(started.pid, started.start_ticks, started.boot_id)
        child = RemoteChild(
            self._node, child_id=child_id, incarnation=incarnation, identity=identity
        )
        self._node.add_child(child)
        return child


_LOST: Final = TreeEnded(
    survivors=(), detail="", num_killed=0, ended_in_grace=False, removed_segments=(), took_s=0.0
)


def _tree_ended(gone: wire.TreeGone) -> TreeEnded:
    return TreeEnded(
        survivors=tuple(_row(pid) for pid in gone.survivors),
        detail=gone.detail,
        num_killed=gone.num_killed,
        ended_in_grace=gone.ended_in_grace,
        removed_segments=(),
        took_s=gone.took_s,
    )


def _row(pid: int) -> ProcessRow:
    """A survivor on another node, of which the pid is all that counts here."""
    return ProcessRow(pid=pid, ppid=0, pgid=0, sid=0, state="", start_ticks=0, name="")
