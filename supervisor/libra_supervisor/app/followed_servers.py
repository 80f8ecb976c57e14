"""The servers of the run as a follower reaches them, by what its leader says of them."""

from random import Random
from typing import Never

import anyio
import anyio.abc

from libra import clock
from libra.config.rollout import SchedulingConfig
from libra.errors import PeerError
from libra.ids import InstanceId, PolicyVersion
from libra.scheduling.scheduler import Scheduler
from libra.scheduling.slot import InstanceSpec
from libra.wire.node_rollouts import ServerEntry, Servers
from libra_supervisor.instances.client import InstanceClient
from libra_supervisor.instances.poller import InstancePoller, Polled
from libra_supervisor.instances.request_watch import RequestWatch


class FollowedServers:
    """`libra_supervisor.app.routing.Servers`. Works while `run` is alive."""

    def __init__(
        self, scheduler: Scheduler, config: SchedulingConfig, *, token: str, rng: Random
    ) -> None:
        self._scheduler = scheduler
        self._config = config
        self._token = token
        self._rng = rng
        self._tasks: anyio.abc.TaskGroup | None = None
        self._entry_of: dict[InstanceId, ServerEntry] = {}
        self._client_of: dict[InstanceId, InstanceClient] = {}
        self._watch_of: dict[InstanceId, RequestWatch] = {}
        self._scope_of: dict[InstanceId, anyio.CancelScope] = {}
        self.wanted: PolicyVersion | None = None
        """The version that requests are to be answered with at least."""

        self.revision = 0
        """The newest of the leader's roster that was taken in."""

    async def run(self) -> Never:
        """Own the connections."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            for instance_id in tuple(self._entry_of):
                self._connect(instance_id)
            await anyio.sleep_forever()
        raise AssertionError  # a sleep for ever ends by cancellation

    def take(self, servers: Servers) -> None:
        """Take in a change of the leader's roster."""
        self.wanted, self.revision = servers.wanted, servers.revision
        for instance_id in servers.gone:
            self._entry_of.pop(instance_id, None)
            self._disconnect(instance_id)
            self._scheduler.remove_instance(instance_id)
        for entry in servers.changed:
            before = self._entry_of.get(entry.instance_id)
            self._entry_of[entry.instance_id] = entry
            if before is None or before.incarnation != entry.incarnation:
                self._disconnect(entry.instance_id)
                self._connect(entry.instance_id)
            elif entry.instance_id in self._client_of:
                self._tell_scheduler(entry)

    def client_of(self, instance_id: InstanceId) -> InstanceClient:
        client = self._client_of.get(instance_id)
        if client is None:
            raise PeerError(f"{instance_id} is no part of the run any more")
        return client

    def watch_of(self, instance_id: InstanceId) -> RequestWatch:
        watch = self._watch_of.get(instance_id)
        if watch is None:
            raise PeerError(f"{instance_id} is no part of the run any more")
        return watch

    def note_progress(self, instance_id: InstanceId) -> None:
        """The leader, which supervises it, sees it by the trajectory."""

    def _connect(self, instance_id: InstanceId) -> None:
        if self._tasks is not None:
            self._scope_of[instance_id] = scope = anyio.CancelScope()
            self._tasks.start_soon(self._follow, self._entry_of[instance_id], scope)

    def _disconnect(self, instance_id: InstanceId) -> None:
        self._client_of.pop(instance_id, None)
        scope = self._scope_of.pop(instance_id, None)
        if scope is not None:
            scope.cancel()

    async def _follow(self, entry: ServerEntry, scope: anyio.CancelScope) -> None:
        """One process of a server: routing knows it while there is a client for it."""
        instance_id = entry.instance_id
        with scope:
            async with InstanceClient(instance_id, entry.url, token=self._token) as client:
                if self._scope_of.get(instance_id) is not scope:
                    return
                self._client_of[instance_id] = client
                watch = self._watch_of.setdefault(instance_id, RequestWatch(rng=self._rng))
                self._tell_scheduler(self._entry_of[instance_id])
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(watch.run, client)
                    if self._config.enable_metrics_feedback:
                        tasks.start_soon(self._poller(entry, client).run)

    def _poller(self, entry: ServerEntry, client: InstanceClient) -> InstancePoller:
        return InstancePoller(
            client,
            entry.incarnation,
            self._on_polled,
            period_s=self._config.metrics_poll_interval_s,
            timeout_s=self._config.metrics_request_timeout_s,
            rng=self._rng,
        )

    def _on_polled(self, polled: Polled) -> None:
        if polled.metrics is not None:
            self._scheduler.on_snapshot(polled.instance_id, polled.metrics.load, polled.at)

    def _tell_scheduler(self, entry: ServerEntry) -> None:
        now, scheduler, instance_id = clock.now(), self._scheduler, entry.instance_id
        spec = InstanceSpec(instance_id=instance_id, incarnation=entry.incarnation, tp=entry.tp)
        scheduler.restart_instance(spec, now, is_planned=entry.is_planned)
        if entry.kv_capacity_tokens is not None:
            scheduler.on_kv_capacity_measured(instance_id, entry.kv_capacity_tokens, now)
        # The version first: with each word requests that wait may be placed.
        scheduler.set_version(instance_id, entry.version, now)
        scheduler.set_ready(instance_id, entry.is_ready, now)
        scheduler.drain_instance(instance_id, entry.is_draining, now)
