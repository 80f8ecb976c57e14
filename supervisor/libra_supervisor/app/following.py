"""The program of a follower: one node's processes, run for the leader until the run is over.

It decides nothing. What it may do is said by its lease (`libra_supervisor.nodes.lease`); what it
does, by the leader's commands (`NodeHands`).
"""

import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from functools import partial
from random import Random
from typing import Final

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from libra import clock
from libra.config.run import RunConfig
from libra.errors import InvariantError, LibraError, SiteError
from libra.ids import RunId
from libra.tracing.log import get_log
from libra.version import __version__
from libra.wire.node import PROTOCOL, Hello, Welcome
from libra_supervisor.app.ending import BUG, INTERRUPTED, Outcome, outcome_of
from libra_supervisor.app.lease_note import lease_note
from libra_supervisor.app.local_stop import LocalStop
from libra_supervisor.app.node_fitness import what_is_lacking
from libra_supervisor.app.node_hands import NodeHands
from libra_supervisor.app.node_making import MakingSite, NodeMaking
from libra_supervisor.app.rank_relay import Tongue
from libra_supervisor.app.shared_config import config_digest, option_digests
from libra_supervisor.app.stop_signals import stop_signals
from libra_supervisor.app.user_threads import abandon_user_threads
from libra_supervisor.events import ChildEvent
from libra_supervisor.journal import read_run_id
from libra_supervisor.nodes.allegiance import Allegiance
from libra_supervisor.nodes.connection import Connection
from libra_supervisor.nodes.follower import FollowerEnd
from libra_supervisor.nodes.interface import interface_of
from libra_supervisor.nodes.lease import LeaseTerms, Standing
from libra_supervisor.nodes.session import KeepLimits
from libra_supervisor.nodes.site import Site
from libra_supervisor.nodes.term import NODES_NAME, KnownEnd, obey_term, obeyed_term, read_term
from libra_supervisor.nodes.transport import dialled, follower_tls
from libra_supervisor.notify import Notifier
from libra_supervisor.process.cgroup import delegated_root
from libra_supervisor.process.identity import identity_of
from libra_supervisor.process.kernel import Linux
from libra_supervisor.process.logs import log_policy_from, open_log_relay
from libra_supervisor.process.spawn import LinuxSpawner, become_subreaper
from libra_supervisor.process.sweep import end_run
from libra_supervisor.process.tree import StopDeadlines
from libra_supervisor.ranks.link import accept_ranks, rank_socket
from libra_supervisor.run_directory import (
    DirectoryHeldError,
    Holder,
    RunDirectory,
    held,
    holder_of,
    in_words,
)

GLOO_VARIABLE: Final = "GLOO_SOCKET_IFNAME"
_LOOK_PERIOD_S: Final = 0.5
_END_LOOK_S: Final = 2.0
_NOTIFY_PERIOD_S: Final = 5.0
_START_EXTENSION_S: Final = 60.0

_log = get_log()


class Following(msgspec.Struct, frozen=True, kw_only=True):
    """What a follower is started with."""

    site: Site
    config: RunConfig
    environ: Mapping[str, str]
    directory: RunDirectory
    """Of the run, on the file system that the nodes share."""

    token: str
    devices: tuple[str, ...]
    """By slot; empty on CPU."""


def node_directory(directory: RunDirectory, node: int) -> RunDirectory:
    """What belongs to one node alone: its lock, its term, its ranks' socket, its log relay."""
    return RunDirectory(directory.root / NODES_NAME / str(node))


@contextmanager
def speaking_for(node: int, own: RunDirectory) -> Iterator[None]:
    """Be the one process that speaks for the node. Raises SiteError when another one does."""
    with ExitStack() as stack:
        try:
            stack.enter_context(held(own))
        except DirectoryHeldError as error:
            raise SiteError(_why_not_ours(node, error.holder)) from error
        yield


def _why_not_ours(node: int, holder: Holder | None) -> str:
    here = os.uname().nodename
    taken = f"{in_words(holder)} speaks for node {node} of this run already"
    if holder is not None and holder.host == here:
        return f"{taken}: end that process first"
    return (
        f"{taken}, and this is {here}: correct nodes, or say with --node-rank which node this "
        "machine is"
    )


async def follow(following: Following) -> Outcome:
    """Serve the leader until the run is over; the caller holds the node's directory.

    Whatever the outcome, nothing that was started here is left running.
    """
    become_subreaper()
    abandon_user_threads()
    try:
        outcome = await _Follower(following).to_end()
    except BaseException as error:  # noqa: BLE001 - the top of the program
        outcome = outcome_of(error)
        if outcome.exit_code == BUG:
            _log.error("bug", traceback="".join(traceback.format_exception(error)))
    say = _log.info if outcome.exit_code == 0 else _log.error
    say("node_ended", exit_code=outcome.exit_code, why=outcome.reason)
    return outcome


async def _told_run_id(following: Following) -> RunId:
    """Wait until the leader has written down which run the directory holds.

    That it can be read here shows that the nodes share the directory.
    """
    path = following.directory.run_id
    with anyio.move_on_after(following.config.supervision.start_timeout_s):
        while True:
            run_id = await anyio.to_thread.run_sync(read_run_id, path, abandon_on_cancel=True)
            if run_id is not None:
                return run_id
            await clock.sleep(_LOOK_PERIOD_S)
    raise SiteError(
        f"no leader has begun a run in {following.directory.root}; is the first node started with "
        "this --run-dir, and is it on a file system that the nodes share?"
    )


class _Follower:
    """Every part of one follower, joined."""

    def __init__(self, following: Following) -> None:
        self._following = following
        self._run_id = RunId("")
        """Empty until the leader has written it down."""

        self._own = node_directory(following.directory, following.site.rank)
        self._supervision = following.config.supervision
        self._outcome: Outcome | None = None
        self._scope = anyio.CancelScope()
        self._notifier = Notifier.from_environment(following.environ)
        self._is_ready = False
        self._stop = LocalStop(following.site.rank, leave=self._leave)

    async def to_end(self) -> Outcome:
        with stop_signals() as signals:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._stop.hear, signals)
                tasks.start_soon(self._notifier.keep_alive)
                tasks.start_soon(self._tell_systemd)
                with self._scope:
                    await self._follow(await _told_run_id(self._following))
                tasks.cancel_scope.cancel()
        return self._outcome or Outcome(INTERRUPTED, "interrupted")

    async def _follow(self, run_id: RunId) -> None:
        self._run_id = run_id
        # A leader that never got to its run took the whole directory away, and made it anew.
        self._own.create()
        kernel = Linux()
        holder = await anyio.to_thread.run_sync(holder_of, self._following.directory)
        if holder is not None:
            raise SiteError(f"{holder} leads this run on this very machine, which is one node")
        # What an earlier process of this node left behind: nobody could end it later.
        for row in await end_run(self._run_id, kernel):
            _log.warning("leftover_does_not_end", pid=row.pid, name=row.name)
        async with open_log_relay(
            self._own.root,
            run_id=self._run_id,
            env=dict(self._following.environ),
            post=self._note_log,
            policy=log_policy_from(self._supervision),
        ) as logs:
            spawner = LinuxSpawner(
                run_id=self._run_id, logs=logs, kernel=kernel, cgroups=delegated_root()
            )
            await self._serve(spawner)

    async def _serve(self, spawner: LinuxSpawner) -> None:
        async with anyio.create_task_group() as tasks:
            hands = self._hands(spawner, tasks)
            side = self._allegiance()
            end = FollowerEnd(side, hands, dial=self._dial, rng=self._rng())
            hands.speak_through(Tongue(end.say, end.say_when_room))
            hands.make_through(NodeMaking(self._making_site(spawner, end), tasks))
            self._stop.ask_through(side, end.say)
            with (
                rank_socket(self._own.root) as (path, listener),
                lease_note(side, self._run_id, self._following.site.rank) as lease,
            ):
                hands.control_socket, hands.lease = path, lease
                tasks.start_soon(lease.run)
                tasks.start_soon(
                    lambda: accept_ranks(listener, run_id=self._run_id, welcome=hands.ranks.welcome)
                )
                tasks.start_soon(self._stop.watch)
                tasks.start_soon(self._give_up, side)
                tasks.start_soon(self._learn_of_end, side)
                try:
                    await end.run()
                finally:
                    with anyio.CancelScope(shield=True):  # bounded by the deadlines of each child
                        self._is_ready = True  # the start is over, however it went
                        self._notifier.stopping("ending children")
                        await hands.let_go("this node leaves")
                        await hands.end_servers("this node leaves")

    def _hands(self, spawner: LinuxSpawner, tasks: anyio.abc.TaskGroup) -> NodeHands:
        following, supervision = self._following, self._supervision
        return NodeHands(
            spawner,
            run_id=self._run_id,
            tasks=tasks,
            devices=following.devices,
            environ=_with_interface(following.environ, following.site.own_host),
            deadlines=StopDeadlines(
                term_grace_s=supervision.term_grace_s, kill_wait_s=supervision.kill_wait_s
            ),
            on_begin=self._begin,
            on_leave=self._leave,
        )

    def _making_site(self, spawner: LinuxSpawner, end: FollowerEnd) -> MakingSite:
        return MakingSite(
            node=self._following.site.rank,
            run_id=self._run_id,
            directory=self._following.directory,
            own=self._own,
            environ=self._following.environ,
            spawner=spawner,
            say=end.say,
            say_when_room=end.say_when_room,
            rng=self._rng(),
        )

    def _allegiance(self) -> Allegiance:
        cluster = self._following.config.cluster
        terms = LeaseTerms(lease_s=cluster.node_lease_s, orphan_grace_s=cluster.node_orphan_grace_s)
        return Allegiance(self._about(), terms, KeepLimits(), now=clock.now())

    def _about(self) -> Hello:
        me = identity_of(os.getpid())
        if me is None:
            raise InvariantError("this process is not in /proc")
        known = obeyed_term(self._own.root)
        return Hello(
            protocol=PROTOCOL,
            version=__version__,
            config_digest=config_digest(self._following.config),
            option_digests=option_digests(self._following.config),
            run_id=self._run_id,
            node=self._following.site.rank,
            host=os.uname().nodename,
            boot_id=me.boot_id,
            pid=me.pid,
            start_ticks=me.start_ticks,
            dial=0,
            term=0 if known is None else known.term,
        )

    def _dial(self) -> AbstractAsyncContextManager[Connection]:
        following, cluster = self._following, self._following.config.cluster
        return dialled(
            following.site.hosts[0],
            following.site.port,
            token=following.token,
            tls=follower_tls(cluster.node_tls_cert, cluster.node_tls_ca),
        )

    async def _begin(self, welcome: Welcome) -> None:
        """Raises SiteError when this machine cannot do its part."""
        await anyio.to_thread.run_sync(obey_term, self._own.root, welcome.term, welcome.leader)
        self._stop.repeat()
        if not self._is_ready and (lack := await self._lack()):
            raise SiteError(lack)
        self._is_ready = True
        self._notifier.ready(f"follows term {welcome.term} as node {self._following.site.rank}")

    async def _lack(self) -> str:
        """What this machine lacks for its part of the plan, while nothing of it runs here."""
        following = self._following
        look = partial(
            what_is_lacking,
            following.directory,
            following.site.rank,
            following.site.own_host,
            following.devices,
        )
        try:
            return await anyio.to_thread.run_sync(look)
        except (OSError, msgspec.DecodeError, LibraError) as error:
            _log.warning("node_not_checked", why=f"the leader's plan cannot be read: {error}")
            return ""

    def _leave(self, exit_code: int, reason: str) -> None:
        if self._outcome is None:  # else it ends already, and a late signal changes nothing
            self._outcome = Outcome(exit_code, reason)
        self._scope.cancel()

    async def _tell_systemd(self) -> None:
        """A start lasts until a leader takes this node in; `_give_up` bounds it."""
        site = self._following.site
        while not self._is_ready:
            self._notifier.extend_start(_START_EXTENSION_S)
            self._notifier.status(f"waits for its leader, {site.hosts[0]} port {site.port}")
            await clock.sleep(_NOTIFY_PERIOD_S)

    async def _give_up(self, side: Allegiance) -> None:
        """Leave when no leader has been there for as long as a start may take."""
        limit_s = self._supervision.start_timeout_s
        alone_since = clock.now()
        while True:
            await clock.sleep(_LOOK_PERIOD_S)
            now = clock.now()
            if side.standing(now=now) is not Standing.OVER:
                alone_since = now
            elif now - alone_since > limit_s:
                reason = f"no leader for {limit_s:g} s after the servers here were ended"
                self._leave(SiteError.exit_code, reason)

    async def _learn_of_end(self, side: Allegiance) -> None:
        """Leave when the run is ended by a leader that could not tell this node."""
        known = KnownEnd()
        while True:
            if side.standing(now=clock.now()) is not Standing.HELD:
                try:
                    found = await anyio.to_thread.run_sync(
                        read_term, self._following.directory.root, abandon_on_cancel=True
                    )
                except SiteError as error:
                    _log.warning("term_not_read", why=str(error))
                else:
                    end = known.end_in(found, term=side.term, leader=side.leader)
                    if end is not None:
                        self._leave(end.exit_code, f"the run is over: {end.reason}")
            await clock.sleep(_END_LOOK_S)

    async def _note_log(self, event: ChildEvent) -> None:
        _log.warning("child_log", kind=type(event).__name__, child=event.child_id)

    def _rng(self) -> Random:
        return Random(f"{self._run_id} {os.getpid()} {clock.wall_ns()}")  # noqa: S311 - jitter


def _with_interface(environ: Mapping[str, str], host: str) -> dict[str, str]:
    """The environment of ranks: gloo finds the others over the interface that has our address."""
    name = None if GLOO_VARIABLE in environ else interface_of(host)
    return dict(environ) if name is None else {**environ, GLOO_VARIABLE: name}
