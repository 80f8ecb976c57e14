"""One vLLM server: its port, its client, and what its supervision needs to know."""

import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from typing import Final, Literal, Protocol, TypeAlias

import anyio
import msgspec

from libra import clock
from libra.config.run import RunConfig
from libra.errors import ChildError, InvariantError, PeerError, RefusedError, SiteError
from libra.ids import ChildId, Incarnation, RunId
from libra.planner.plan import InstancePlacement
from libra.scheduling.scheduler import Scheduler
from libra.wire.instance import GO_FILE_VARIABLE, WAITING_SUFFIX, InstanceState
from libra_supervisor.app.drain_watch import Traffic
from libra_supervisor.app.engine_watch import EngineWatch
from libra_supervisor.app.slumber import MemoryGate, Slumber
from libra_supervisor.instances.client import InstanceClient
from libra_supervisor.instances.poller import Polled
from libra_supervisor.instances.port_lease import lease_port
from libra_supervisor.instances.serving_meter import ServingMeter
from libra_supervisor.instances.vllm import InstancePlacement as ServerPlacement
from libra_supervisor.instances.vllm import ServingPaths, server_spec, start_digest
from libra_supervisor.process.child import RunningChild
from libra_supervisor.process.lifecycle import ChildHooks
from libra_supervisor.process.spawn import Spawner
from libra_supervisor.process.spec import Limits, ProcessSpec
from libra_supervisor.run_directory import RunDirectory

READY_POLL_S: Final = 0.5
DRAIN_POLL_S: Final = 0.1


class HeldPort(Protocol):
    """A port that nobody else is given until it is closed."""

    port: int

    def close(self) -> None: ...


HoldPort: TypeAlias = Callable[[str, int], Awaitable[HeldPort]]
"""Holds a port, any for 0, at an address. Raises SiteError."""


async def _held_here(host: str, port: int) -> HeldPort:
    return lease_port(host, port)


class EngineSite(msgspec.Struct, frozen=True, kw_only=True):
    """What every server of one run on this node has in common."""

    run_id: RunId
    directory: RunDirectory
    config: RunConfig
    device: Literal["cpu", "cuda"]
    host: str
    token: str
    token_file: Path
    env: Mapping[str, str]
    """The environment the supervisor was started with."""

    devices: tuple[str, ...]
    """By slot: CUDA devices; on CPU the core to bind to, round robin."""

    meter: ServingMeter
    cores: tuple[tuple[int, ...], ...] = ()
    """By slot: cores beside its CUDA device; none of a slot leaves all."""

    def cores_of(self, slot: int) -> tuple[int, ...]:
        return self.cores[slot] if self.cores else ()


class Timings(msgspec.Struct, frozen=True):
    """Of one planned replacement, in seconds."""

    stop_s: float
    load_s: float


class Replacement:
    """A planned change of process on its way: the next one starts from `directory`."""

    def __init__(self, directory: Path, *, begun_at: float) -> None:
        self.directory = directory
        self._begun_at = begun_at
        self.stopped_at = begun_at
        self.ready_at = begun_at
        self.is_superseded = False
        self.is_over = anyio.Event()

    def supersede(self) -> None:
        self.is_superseded = True
        self.is_over.set()

    def timings(self) -> Timings:
        return Timings(self.stopped_at - self._begun_at, self.ready_at - self.stopped_at)


class Engine(ChildHooks):
    """One instance: its port, its client, and what its supervision needs to know."""

    def __init__(  # noqa: PLR0913 - what one server has of its own
        self,
        site: EngineSite,
        placement: InstancePlacement,
        scheduler: Scheduler,
        *,
        port: int,
        served_directory: Callable[[], Path | None],
        rng: Random,
        gate: MemoryGate | None = None,
        has_devices: bool = True,
        spawner: Spawner | None = None,
        hold_port: HoldPort | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """Nothing is started yet; `port` 0 takes any.

        Without `has_devices` a process comes up as far as it can and waits for `give_devices`.

        `served_directory` gives the committed version's directory, from which a process that
        replaces a failed one starts; None for the base model. `traffic` is what is in flight there,
        also of other nodes; None: the scheduler's own.
        """
        self._gate = gate
        self._has_devices = has_devices
        self._go_file: Path | None = None
        self.placement = placement
        self.slumber = Slumber(
            placement.instance_id, gate, timeout_s=site.config.supervision.liveness_stall_s
        )
        self._site = site
        self._scheduler = scheduler
        self._traffic: Traffic = traffic or scheduler
        self._port = port
        self._served_directory = served_directory
        self.watch = EngineWatch(
            placement.instance_id,
            site.config,
            self.slumber,
            num_in_flight=self._num_in_flight,
            show=self._show,
            rng=rng,
        )
        self._replacement: Replacement | None = None
        self.loading_directory: Path | None = None
        """The published version that a process which is not ready yet starts from."""

        self._hold_port: HoldPort = hold_port or _held_here
        self.spawner = spawner
        """What starts its processes, when it is not on this node."""

        self._lease: HeldPort | None = None
        self._had_port = False
        self._url: str | None = None
        self._client: InstanceClient | None = None

    @property
    def client(self) -> InstanceClient:
        """The client of the newest process."""
        if self._client is None:
            raise InvariantError(f"{self.placement.instance_id} was called before it was started")
        return self._client

    @property
    def url(self) -> str:
        if self._url is None:
            raise InvariantError(f"{self.placement.instance_id} has no port before it is started")
        return self._url

    @property
    def is_started(self) -> bool:
        return self._client is not None

    async def spec(self, incarnation: Incarnation) -> ProcessSpec:
        await self._disconnect()
        if self._replacement is not None:
            self._replacement.stopped_at = clock.now()
        site = self._site
        self._lease = await self._leased()
        self._had_port = True
        server = self._server(incarnation, self._lease.port)
        await self._connect(server.base_url)
        directory = self._next_directory()
        self.loading_directory = directory
        spec = server_spec(
            site.config,
            server,
            run_id=site.run_id,
            paths=self._paths(),
            environment=site.env,
            served_directory=None if directory is None else str(directory),
        )
        cores = sorted({core for slot in self.placement.slots for core in site.cores_of(slot)})
        return msgspec.structs.replace(
            spec,
            limits=Limits(cpu_cores=tuple(cores)),
            env={**spec.env, **self._go_variables(incarnation)},
        )

    def _go_variables(self, incarnation: Incarnation) -> dict[str, str]:
        if self._has_devices:
            self._go_file = None
            return {}
        self._go_file = self._site.directory.go_file_of(incarnation)
        self._go_file.parent.mkdir(exist_ok=True)
        return {GO_FILE_VARIABLE: str(self._go_file)}

    @property
    def is_warm(self) -> bool:
        """Whether a process has come up to where it needs its devices."""
        go_file = self._go_file
        return go_file is not None and go_file.with_name(go_file.name + WAITING_SUFFIX).exists()

    async def give_devices(self) -> None:
        """Let the process that waits go on, once its devices have the memory it needs."""
        while await self._gated() is not None:
            await clock.sleep(READY_POLL_S)
        self._has_devices = True
        if self._go_file is not None:
            self._go_file.touch()

    async def hindrance(self) -> str | None:
        if self.slumber.is_on:
            return "its devices are lent to training"
        return await self._gated() if self._has_devices else None

    async def _gated(self) -> str | None:
        return None if self._gate is None else await self._gate.hindrance()

    def required_facts(self) -> dict[str, str]:
        """What a process must have been started with to be taken over."""
        server = self._server(Incarnation(""), 0)
        site = self._site
        digest = start_digest(site.config, server, paths=self._paths(), environment=site.env)
        fixed = self._server(Incarnation(""), self._port).base_url
        return {"configuration": digest, **({"url": fixed} if self._port else {})}

    def facts(self) -> dict[str, str]:
        return {**self.required_facts(), "url": self.url}

    async def take_over(self, facts: dict[str, str]) -> None:
        await self._connect(facts["url"])
        self._had_port = True

    async def replaced(self, directory: Path) -> Timings:
        """Wait until a process that has started from `directory` is ready; say how long it took.

        The newest call decides from what the next process starts. Raises PeerError when that is
        no longer this one.
        """
        if self._replacement is not None:
            self._replacement.supersede()
        replacement = self._replacement = Replacement(directory, begun_at=clock.now())
        try:
            await replacement.is_over.wait()
        finally:
            if self._replacement is replacement:
                self._replacement = None
        if replacement.is_superseded:
            name = self.placement.instance_id
            raise PeerError(f"{name} is being replaced by a process with newer weights")
        return replacement.timings()

    def _next_directory(self) -> Path | None:
        if self._replacement is not None:
            return self._replacement.directory
        return self._served_directory()

    async def until_ready(self, child: RunningChild) -> None:
        """Wait for the right process to answer and to do a forward pass: /health proves neither."""
        state = await self._first_state()
        if state.incarnation != child.incarnation:
            raise ChildError(
                f"another server ({state.incarnation}) answers at {self.url}, the port of "
                f"{child.incarnation}"
            )
        if state.is_asleep:
            raise ChildError("it sleeps, and whoever put it to sleep is gone")
        if state.policy_version is not None:
            await self.watch.probe(self.client)
        # Else it is an adopted server whose reload was cut off: it refuses to answer until the
        # next reload, which has a probe of its own.
        loaded, self.loading_directory = self.loading_directory, None
        if self._replacement is not None and self._replacement.directory == loaded:
            self._replacement.ready_at = clock.now()
            self._replacement.is_over.set()

    async def until_stuck(self, child: RunningChild) -> str:
        return await self.watch.until_stuck(self.client, child.incarnation)

    async def drain(self, child: RunningChild) -> None:
        while self._num_in_flight():
            await clock.sleep(DRAIN_POLL_S)

    async def close(self) -> None:
        await self._disconnect()
        self._release_port()

    async def _disconnect(self) -> None:
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
            self._client = None
        self._url = None

    def _release_port(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    async def _leased(self) -> HeldPort:
        """The configured port stays ours from life to life; else each life has another one.

        Raises SiteError at the first start, later ChildError: then it may be a matter of time.
        """
        if self._lease is not None and self._port:
            return self._lease
        self._release_port()
        try:
            return await self._hold_port(self._site.host, self._port)
        except SiteError as error:
            if self._had_port:
                raise ChildError(str(error)) from error
            raise

    async def _connect(self, url: str) -> None:
        self._url = url
        client = InstanceClient(self.placement.instance_id, url, token=self._site.token)
        self._client = await client.__aenter__()

    def _server(self, incarnation: Incarnation, port: int) -> ServerPlacement:
        site, placement = self._site, self.placement
        return ServerPlacement(
            instance_id=placement.instance_id,
            incarnation=incarnation,
            device_kind=site.device,
            devices=tuple(site.devices[slot % len(site.devices)] for slot in placement.slots),
            host=site.host,
            port=port,
        )

    def _paths(self) -> ServingPaths:
        site = self._site
        return ServingPaths(
            python=sys.executable,
            weights_directory=str(site.directory.weights),
            token_file=str(site.token_file),
            working_directory=str(site.directory.root),
            log_path=str(site.directory.log_of(ChildId(self.placement.instance_id))),
        )

    async def _first_state(self) -> InstanceState:
        while True:
            try:
                await self.client.health()
                return await self.client.state()
            except (PeerError, RefusedError):
                await clock.sleep(READY_POLL_S)

    def _num_in_flight(self) -> int:
        return self._traffic.num_in_flight(self.placement.instance_id)

    def _show(self, polled: Polled) -> None:
        """Let the scheduler and the meter know what a look has found."""
        instance_id, metrics = self.placement.instance_id, polled.metrics
        if metrics is not None:
            self._scheduler.on_snapshot(instance_id, metrics.load, polled.at)
            self._site.meter.on_page(instance_id, polled.incarnation, metrics.serving)
