"""The leader's side of making trajectories on all nodes: `ports.Rollouts` over `rollouts.spread`.

The loop knows nothing of it: a sample begins and ends once, wherever and how often it was made.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Never, assert_never

import anyio
import msgspec

from libra import clock
from libra.errors import PeerError
from libra.ids import GroupId, InstanceId, NodeRank
from libra.rollouts.evaluation import is_evaluated
from libra.rollouts.group import AdmittedGroup
from libra.rollouts.trajectory import SampleFailed
from libra.tracing.log import get_log
from libra.wire import node_rollouts as wire
from libra.wire.api import NodeStatus
from libra.wire.node_rollouts import MAX_TRAJECTORY_BYTES, RolloutOrder, RolloutWord
from libra_supervisor.app.drain_watch import Traffic
from libra_supervisor.events import (
    SampleFinished,
    SampleGaveUp,
    SampleProgressed,
    SampleStarted,
)
from libra_supervisor.nodes.remote import RemoteNode
from libra_supervisor.nodes.site import LEADER
from libra_supervisor.rollouts.border import arrived_trajectory, failure_kind
from libra_supervisor.rollouts.roster import Roster
from libra_supervisor.rollouts.runner import Post, RolloutRunner, SampleEvent
from libra_supervisor.rollouts.spread import Again, Drop, Make, Spread, SpreadCommand

_JOBS_PER_TERM: Final = 1 << 32
_FIRST_PAUSE_S: Final = 10.0
_LONGEST_PAUSE_S: Final = 600.0
"""Before a node that could not make any trajectories is asked again."""

_PAUSE_LOOK_S: Final = 1.0

_log = get_log()


class NodePart(msgspec.Struct, kw_only=True):
    """What a node that was asked to take part has said."""

    read: int = -1
    """The newest roster that it has read."""

    num_requests: Mapping[InstanceId, int] = {}
    why_not: str = ""
    """It makes nothing; empty: it does, or is getting ready."""

    has_other_data: bool = False
    pause_s: float
    """Until it is asked again, when it cannot."""

    waited_s: float = 0.0


class SpreadRollouts:
    """Training's and evaluations' groups, over this node and `others`."""

    def __init__(  # noqa: PLR0913 - what the others are told, and whom they answer
        self,
        others: Mapping[NodeRank, RemoteNode],
        *,
        term: int,
        traffic: Traffic,
        fingerprints: tuple[str, ...],
        token_file: Path,
        kv_capacity_by_tp: Mapping[int, int],
        post: Post,
    ) -> None:
        """`traffic`: of this node. `fingerprints`: what data the others must have."""
        self._others = others
        self._traffic = traffic
        self._fingerprints = fingerprints
        self._token_file = token_file
        self._kv_capacity_by_tp = dict(kv_capacity_by_tp)
        self._post = post
        self._spread = Spread(LEADER, first_job=term * _JOBS_PER_TERM + 1)
        self._roster = Roster()
        self._roster_changed = anyio.Event()
        self._parts: dict[NodeRank, NodePart] = {}
        self._pieces: dict[NodeRank, dict[tuple[int, int], bytearray]] = {}
        """What has come of trajectories, by job and sample."""

        self._own: dict[bool, RolloutRunner] = {}
        self._note_served: Callable[[InstanceId], None] = _ignore
        self._heard: deque[SampleEvent] = deque()
        """Not yet passed on; bounded by the samples that are in progress."""

        self._wake = anyio.Event()

    def begin(
        self,
        own: RolloutRunner,
        evaluations: RolloutRunner,
        *,
        note_served: Callable[[InstanceId], None],
    ) -> None:
        """Have runners of this node; `note_served` hears which servers answered other nodes."""
        self._own = {False: own, True: evaluations}
        self._note_served = note_served
        for rank, node in self._others.items():
            if node.is_member:
                self.on_joined(rank)

    async def run(self) -> None:
        """Pass on what the others say, and tell them of servers; until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tell_roster)
            tasks.start_soon(self._ask_again)
            await self._pass_on()

    async def _pass_on(self) -> Never:
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            while self._heard:
                await self._post(self._heard.popleft())

    # libra_supervisor.ports.Rollouts

    def start(self, group: AdmittedGroup) -> None:
        self._do(self._spread.start(group))

    def cancel(self, group_id: GroupId) -> None:
        self._do(*self._spread.cancel(group_id))

    def ask_again(self, group_id: GroupId, sample_indices: Sequence[int]) -> None:
        self._do(*self._spread.ask_again(group_id, sample_indices))

    def cancel_all(self, reason: str) -> None:  # noqa: ARG002 - the loop has logged it
        self._do(*self._spread.cancel_all())

    # libra_supervisor.app.drain_watch.Traffic

    def num_in_flight(self, instance_id: InstanceId) -> int:
        elsewhere = sum(
            part.num_requests.get(instance_id, 0)
            + (
                self._spread.is_able(node)
                and self._roster.may_still_get_requests(instance_id, read=part.read)
            )
            for node, part in self._parts.items()
        )
        return self._traffic.num_in_flight(instance_id) + elsewhere

    def give_back(self, instance_id: InstanceId) -> None:
        """Have the other nodes place anew what they have there; call it when it is withdrawn."""
        self._flush_roster()
        for node, part in self._parts.items():
            if not part.why_not:
                self._tell(node, wire.GiveBack(instance_id))

    # This node

    async def on_own(self, event: SampleEvent) -> None:
        """Take what this node's runners have to say."""
        group_id = _group_of(event)
        number = self._spread.number_of(group_id)
        if number is None:
            return
        match event:
            case SampleStarted(_, sample):
                told: SampleEvent | None = self._spread.on_begun(LEADER, number, sample)
            case SampleProgressed(_, sample):
                told = self._spread.on_alive(LEADER, number, sample)
            case SampleGaveUp(_, sample, failure):
                told = self._spread.on_failed(LEADER, number, sample, failure)
            case SampleFinished(trajectory):
                told = self._spread.on_finished(LEADER, number, trajectory)
            case _:
                assert_never(event)
        if told is not None:
            await self._post(told)

    # The others: libra_supervisor.app.cluster.NodeListener

    def on_joined(self, node: NodeRank) -> None:
        if not self._own:
            return  # it is asked when there is something to make
        self._ask(node, NodePart(pause_s=_FIRST_PAUSE_S))

    def on_suspected(self, node: NodeRank) -> None:
        self._spread.on_silent(node)

    def on_recovered(self, node: NodeRank) -> None:
        self._spread.on_heard(node)

    def on_lost(self, node: NodeRank) -> None:
        self._parts.pop(node, None)
        self._take_back(node)

    def on_word(self, node: NodeRank, word: RolloutWord) -> None:  # noqa: C901, PLR0912 - a table
        """Raises PeerError for a word without sense."""
        match word:
            case wire.CanMake(fingerprints):
                self._on_able(node, fingerprints)
            case wire.CannotMake(reason):
                self._on_unable(node, reason)
            case wire.StoppedMaking(reason):
                _log.warning("node_stopped_making", node=node, why=reason)
                self._take_back(node)
                self.on_joined(node)
            case wire.InUse(revision, num_requests):
                if (part := self._parts.get(node)) is not None:
                    part.read, part.num_requests = revision, num_requests
            case wire.SampleBegun(job, sample):
                self._hear(self._spread.on_begun(node, job, sample))
            case wire.SampleAlive(job, sample):
                self._hear(self._spread.on_alive(node, job, sample))
            case wire.SampleGone(job, sample, kind, message):
                failure = SampleFailed(failure_kind(kind), message)
                self._hear(self._spread.on_failed(node, job, sample, failure))
            case wire.TrajectoryPiece():
                self._on_piece(node, word)
            case _:
                assert_never(word)

    # Views

    def status(self, nodes: tuple[NodeStatus, ...]) -> tuple[NodeStatus, ...]:
        """The nodes with what each has to make, or why it makes nothing."""
        return tuple(map(self._status_of, nodes))

    def node_of(self, group_id: GroupId) -> NodeRank | None:
        """Which node makes the rest of the group; None when it is not in progress."""
        return self._spread.node_of(group_id)

    # The roster

    @property
    def roster(self) -> Roster:
        """Call `note_roster` after changing it."""
        return self._roster

    def note_roster(self) -> None:
        self._roster_changed.set()

    async def _tell_roster(self) -> None:
        """All that one turn of the loop has changed is told at once."""
        while True:
            await self._roster_changed.wait()
            self._roster_changed = anyio.Event()
            self._flush_roster()

    def _flush_roster(self) -> None:
        changes = self._roster.take_changes()
        if changes is not None:
            for node, part in self._parts.items():
                if not part.why_not:
                    self._tell(node, changes)

    # Parts

    def _ask(self, node: NodeRank, part: NodePart, *, reads_anew: bool = False) -> None:
        self._parts[node] = part
        order = wire.TakePart(
            token_file=str(self._token_file),
            kv_capacity_by_tp=self._kv_capacity_by_tp,
            servers=self._roster.whole(),
            reads_anew=reads_anew,
        )
        self._tell(node, order)

    async def _ask_again(self) -> Never:
        """What kept a node from making any may have been mended."""
        while True:
            await clock.sleep(_PAUSE_LOOK_S)
            for node, part in tuple(self._parts.items()):
                if not part.why_not:
                    continue
                part.waited_s += _PAUSE_LOOK_S
                if part.waited_s >= part.pause_s:
                    longer = NodePart(pause_s=min(_LONGEST_PAUSE_S, 2 * part.pause_s))
                    self._ask(node, longer, reads_anew=part.has_other_data)

    def _on_able(self, node: NodeRank, fingerprints: tuple[str, ...]) -> None:
        if fingerprints != self._fingerprints:
            self._on_unable(node, "its data are not those of the leader", has_other_data=True)
            return
        _log.info("node_makes_trajectories", node=node)
        self._spread.on_able(node)

    def _on_unable(self, node: NodeRank, reason: str, *, has_other_data: bool = False) -> None:
        pause_s = self._parts[node].pause_s if node in self._parts else _FIRST_PAUSE_S
        _log.error("node_makes_no_trajectories", node=node, why=reason, again_in_s=pause_s)
        self._parts[node] = NodePart(why_not=reason, has_other_data=has_other_data, pause_s=pause_s)
        self._take_back(node)

    def _take_back(self, node: NodeRank) -> None:
        """It makes nothing any more: others make what is left."""
        self._pieces.pop(node, None)
        makes = self._spread.on_gone(node)
        if makes:
            samples = sum(len(make.samples) for make in makes)
            _log.warning("samples_made_elsewhere", node=node, groups=len(makes), samples=samples)
        self._do(*makes)

    def _do(self, *commands: SpreadCommand) -> None:
        for command in commands:
            if command.node == LEADER:
                self._do_here(command)
            else:
                self._do_there(command)

    def _do_here(self, command: SpreadCommand) -> None:
        match command:
            case Make(_, _, group, samples):
                self._own[is_evaluated(group.group_id)].start(group, samples)
            case Again(_, _, samples, group_id):
                self._own[is_evaluated(group_id)].ask_again(group_id, samples)
            case Drop(_, _, group_id):
                self._own[is_evaluated(group_id)].cancel(group_id)
            case _:
                assert_never(command)

    def _do_there(self, command: SpreadCommand) -> None:
        match command:
            case Make(node, job, group, samples):
                # What is routed to has to be known before there is anything to route.
                self._flush_roster()
                self._tell(node, _order(job, group, samples))
            case Again(node, job, samples, _):
                self._tell(node, wire.MakeAgain(job, samples))
            case Drop(node, job, _):
                self._forget_pieces(node, job)
                self._tell(node, wire.DropJob(job))
            case _:
                assert_never(command)

    def _tell(self, node: NodeRank, order: RolloutOrder) -> None:
        try:
            self._others[node].say(order)
        except PeerError as error:
            # It is about to be lost, and what it has to make with it.
            self._spread.on_silent(node)
            _log.info("node_not_told", node=node, order=type(order).__name__, why=str(error))

    def _hear(self, event: SampleEvent | None) -> None:
        if event is not None:
            self._heard.append(event)
            self._wake.set()

    def _on_piece(self, node: NodeRank, piece: wire.TrajectoryPiece) -> None:
        group = self._spread.group_of(node, piece.job, piece.sample)
        if group is None:
            return
        of_node, key = self._pieces.setdefault(node, {}), (piece.job, piece.sample)
        data = of_node.setdefault(key, bytearray())
        data += piece.data
        if not piece.is_last and len(data) <= MAX_TRAJECTORY_BYTES:
            return
        del of_node[key]
        try:
            trajectory = arrived_trajectory(data, group, piece.sample)
        except PeerError as error:
            failure = SampleFailed("workflow", f"node {node} sent no trajectory: {error}")
            self._hear(self._spread.on_failed(node, piece.job, piece.sample, failure))
            return
        self._hear(self._spread.on_finished(node, piece.job, trajectory))
        if (part := self._parts.get(node)) is not None:
            part.pause_s = _FIRST_PAUSE_S
        for instance_id in set(trajectory.instance_ids):
            self._note_served(instance_id)

    def _forget_pieces(self, node: NodeRank, job: int) -> None:
        of_node = self._pieces.get(node, {})
        for key in [key for key in of_node if key[0] == job]:
            del of_node[key]

    def _status_of(self, status: NodeStatus) -> NodeStatus:
        node = NodeRank(status.node)
        part = self._parts.get(node)
        why = "" if part is None or not part.why_not else f"makes no trajectories: {part.why_not}"
        return msgspec.structs.replace(
            status,
            num_samples=self._spread.num_unfinished(node),
            detail=status.detail or why,
        )


def _order(job: int, group: AdmittedGroup, samples: tuple[int, ...]) -> wire.MakeSamples:
    return wire.MakeSamples(
        job=job,
        prompt_id=group.prompt.prompt_id,
        row=group.prompt.row,
        epoch=group.prompt.epoch,
        attempt=group.attempt,
        n_samples=group.n_samples,
        samples=samples,
    )


def _group_of(event: SampleEvent) -> GroupId:
    if isinstance(event, SampleFinished):
        return event.trajectory.group_id
    return event.group_id


def _ignore(_instance_id: InstanceId) -> None:
    """Nobody asks yet who was served."""
