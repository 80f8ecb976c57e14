"""The vLLM servers of a run: one supervision and one HTTP client per instance."""

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Final, Literal, Self

import anyio
import msgspec
from anyio.abc import TaskGroup

from libra import clock
from libra.config.run import RunConfig
from libra.config.supervision import SupervisionConfig
from libra.config.weights import WeightsConfig
from libra.errors import ChildError, InvariantError, LibraError, PeerError, RefusedError
from libra.ids import ChildId, Incarnation, InstanceId, RequestId, RunId
from libra.planner.plan import InstancePlacement
from libra.scheduling.scheduler import Scheduler
from libra.tracing.log import get_log
from libra.wire.instance import InstanceState, ReloadAck, ReloadRequest, Sampling
from libra_supervisor.events import ChildEvent
from libra_supervisor.instances.client import InstanceClient
from libra_supervisor.instances.health import Health, HealthMonitor
from libra_supervisor.instances.metrics import server_metrics
from libra_supervisor.instances.poller import InstancePoller, Polled
from libra_supervisor.instances.port_lease import PortLease, lease_port
from libra_supervisor.instances.vllm import InstancePlacement as ServerPlacement
from libra_supervisor.instances.vllm import ServingPaths, server_spec
from libra_supervisor.process.child import RunningChild
from libra_supervisor.process.lifecycle import ChildHooks, ChildStatus, deadlines_from
from libra_supervisor.process.restart import RestartBudget, policy_from
from libra_supervisor.process.spawn import Spawner
from libra_supervisor.process.spec import ProcessSpec
from libra_supervisor.process.supervise import Supervision
from libra_supervisor.run_directory import RunDirectory

READY_POLL_S: Final = 0.5
DRAIN_POLL_S: Final = 0.1
METRICS_TIMEOUT_S: Final = 5.0
PROBE_TIMEOUT_S: Final = 30.0
FIRST_TOKEN: Final = Sampling(max_new_tokens=1, temperature=0.0)

_log = get_log()


class FleetSite(msgspec.Struct, frozen=True, kw_only=True):
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


class Timings(msgspec.Struct, frozen=True):
    """Of one planned replacement, in seconds."""

    stop_s: float
    load_s: float


class Replacement:
    """A planned change of process on its way."""

    def __init__(self, *, begun_at: float) -> None:
        self._begun_at = begun_at
        self.stopped_at = begun_at
        self.ready_at = begun_at
        self.is_ready = anyio.Event()

    def timings(self) -> Timings:
        return Timings(self.stopped_at - self._begun_at, self.ready_at - self.stopped_at)


class Engine(ChildHooks):
    """One instance: its port, its client, and what its supervision needs to know."""

    def __init__(
        self,
        site: FleetSite,
        placement: InstancePlacement,
        scheduler: Scheduler,
        *,
        port: int,
        served_directory: Callable[[], Path | None],
        rng: Random,
    ) -> None:
        """Nothing is started yet; `port` 0 takes any.

        `served_directory` gives the committed version's directory, from which a process that
        replaces a failed one starts; None for the base model.
        """
        self.placement = placement
        self.is_excused = False
        """True while a reload is asked for: meanwhile no progress is owed."""

        self.next_directory: Path | None = None
        """While a reload by restart goes on: the version that the next process starts from."""

        self._site = site
        self._scheduler = scheduler
        self._port = port
        self._served_directory = served_directory
        self._rng = rng
        self._was_excused = False
        self._replacement: Replacement | None = None
        self._lease: PortLease | None = None
        self._client: InstanceClient | None = None

    @property
    def client(self) -> InstanceClient:
        """The client of the newest process."""
        if self._client is None:
            raise InvariantError(f"{self.placement.instance_id} was called before it was started")
        return self._client

    @property
    def url(self) -> str:
        if self._lease is None:
            raise InvariantError(f"{self.placement.instance_id} has no port before it is started")
        host = f"[{self._site.host}]" if ":" in self._site.host else self._site.host
        return f"http://{host}:{self._lease.port}"

    @property
    def is_started(self) -> bool:
        return self._client is not None

    async def spec(self, incarnation: Incarnation) -> ProcessSpec:
        await self.close()
        if self._replacement is not None:
            self._replacement.stopped_at = clock.now()
        site, placement = self._site, self.placement
        self._lease = lease_port(site.host, self._port)
        client = InstanceClient(placement.instance_id, self.url, token=site.token)
        self._client = await client.__aenter__()
        directory = self.next_directory or self._served_directory()
        return server_spec(
            site.config,
            ServerPlacement(
                instance_id=placement.instance_id,
                incarnation=incarnation,
                device_kind=site.device,
                devices=tuple(site.devices[slot % len(site.devices)] for slot in placement.slots),
                host=site.host,
                port=self._lease.port,
            ),
            run_id=site.run_id,
            paths=ServingPaths(
                python=sys.executable,
                weights_directory=str(site.directory.weights),
                token_file=str(site.token_file),
                working_directory=str(site.directory.root),
                log_path=str(site.directory.log_of(ChildId(placement.instance_id))),
            ),
            environment=site.env,
            served_directory=None if directory is None else str(directory),
        )

    async def replaced(self) -> Timings:
        """Wait until another process than the present one is ready, and say how long it took."""
        replacement = self._replacement = Replacement(begun_at=clock.now())
        await replacement.is_ready.wait()
        return replacement.timings()

    async def until_ready(self, child: RunningChild) -> None:
        """Wait for the right process to answer and to do a forward pass: /health proves neither."""
        state = await self._first_state()
        if state.incarnation != child.incarnation:
            raise ChildError(
                f"another server ({state.incarnation}) answers at {self.url}, the port of "
                f"{child.incarnation}"
            )
        await self._probe()
        if self._replacement is not None:
            self._replacement.ready_at = clock.now()
            self._replacement.is_ready.set()
            self._replacement = None

    async def until_stuck(self, child: RunningChild) -> str:
        supervision = self._site.config.supervision
        stall_s = supervision.liveness_stall_s
        monitor = HealthMonitor(stall_s=stall_s, silence_s=stall_s, now=clock.now())
        looked = anyio.Event()

        def take(polled: Polled) -> None:
            self._take(polled, monitor)
            looked.set()

        scheduling = self._site.config.heterogeneous_rollout.scheduling
        poller = InstancePoller(
            self.client,
            child.incarnation,
            take,
            period_s=scheduling.metrics_poll_interval_s,
            timeout_s=scheduling.metrics_request_timeout_s,
            rng=self._rng,
        )
        health = Health("loading")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poller.run)
            while health.state != "dead":
                await looked.wait()
                looked = anyio.Event()
                health = monitor.health(now=clock.now())
                if health.needs_probe:
                    health = await self._doubted(monitor)
            tasks.cancel_scope.cancel()
        return health.reason

    async def drain(self, child: RunningChild) -> None:
        while self._scheduler.num_in_flight(self.placement.instance_id):
            await clock.sleep(DRAIN_POLL_S)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
            self._client = None
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    async def _first_state(self) -> InstanceState:
        while True:
            try:
                await self.client.health()
                return await self.client.state()
            except (PeerError, RefusedError):
                await clock.sleep(READY_POLL_S)

    async def _probe(self) -> None:
        """One forward pass. Raises ChildError when the server cannot do it."""
        request = RequestId(f"probe-{self.placement.instance_id}-{self._rng.getrandbits(32):08x}")
        try:
            await self.client.complete([0], FIRST_TOKEN, request_id=request)
        except LibraError as error:
            raise ChildError(f"a forward pass fails: {error}") from error

    async def _doubted(self, monitor: HealthMonitor) -> Health:
        monitor.on_probe_sent()
        has_passed = False
        with anyio.move_on_after(PROBE_TIMEOUT_S):
            try:
                await self._probe()
                has_passed = True
            except ChildError as error:
                _log.warning("probe_failed", instance=self.placement.instance_id, why=str(error))
        monitor.on_probe(has_passed=has_passed, now=clock.now())
        return monitor.health(now=clock.now())

    def _take(self, polled: Polled, monitor: HealthMonitor) -> None:
        instance_id, metrics = self.placement.instance_id, polled.metrics
        if self.is_excused or self._was_excused:
            monitor.on_excused(is_excused=self.is_excused, now=polled.at)
            self._was_excused = self.is_excused
        monitor.on_health(polled.health, now=polled.at)
        monitor.on_progress(
            num_tokens=None if metrics is None else metrics.num_tokens,
            num_running=None if metrics is None else metrics.load.num_running,
            num_in_flight=self._scheduler.num_in_flight(instance_id),
            now=polled.at,
        )
        if metrics is not None:
            self._scheduler.on_snapshot(instance_id, metrics.load, polled.at)


class Fleet:
    """`libra_supervisor.ports.Engines` over real servers. An asynchronous context manager."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        config: SupervisionConfig,
        spawner: Spawner,
        weights: WeightsConfig,
        post: Callable[[ChildEvent], Awaitable[None]],
        rng: Random,
    ) -> None:
        self._weights = weights
        self._engines = {engine.placement.instance_id: engine for engine in engines}
        self._supervisions = {
            instance_id: Supervision(
                ChildId(instance_id),
                engine,
                spawner=spawner,
                budget=RestartBudget(policy_from(config)),
                deadlines=deadlines_from(config),
                post=post,
                rng=rng,
            )
            for instance_id, engine in self._engines.items()
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):  # closing local sockets does not wait
            for engine in self._engines.values():
                await engine.close()

    def start(self, tasks: TaskGroup) -> None:
        """Begin every instance's life; they start side by side."""
        for supervision in self._supervisions.values():
            tasks.start_soon(supervision.run)

    def stop(self) -> None:
        """Drain and end every server; called again, in a hurry."""
        for supervision in self._supervisions.values():
            supervision.stop()

    async def until_down(self) -> None:
        for supervision in self._supervisions.values():
            await supervision.until_down()

    def status_of(self, instance_id: InstanceId) -> ChildStatus:
        return self._supervisions[instance_id].status()

    def client_of(self, instance_id: InstanceId) -> InstanceClient:
        return self._engines[instance_id].client

    def url_or_none(self, instance_id: InstanceId) -> str | None:
        """The address of the newest process; None for one that is unknown or not started."""
        engine = self._engines.get(instance_id)
        return engine.url if engine is not None and engine.is_started else None

    def tp_of(self, instance_id: InstanceId) -> int:
        return self._engines[instance_id].placement.tp

    def note_progress(self, instance_id: InstanceId) -> None:
        """A request was served: failures before it no longer count as a row."""
        self._supervisions[instance_id].note_progress()

    # libra_supervisor.ports.Engines

    async def ask_state(self, instance_id: InstanceId) -> InstanceState:
        return await self.client_of(instance_id).state()

    async def ask_kv_capacity(self, instance_id: InstanceId) -> int | None:
        page = await self.client_of(instance_id).metrics_text(timeout_s=METRICS_TIMEOUT_S)
        incarnation = self._supervisions[instance_id].status().incarnation or Incarnation("")
        metrics = server_metrics(page, incarnation=incarnation, sampled_at=clock.now())
        return metrics.load.kv_capacity_tokens

    async def reload(self, instance_id: InstanceId, request: ReloadRequest) -> ReloadAck:
        engine = self._engines[instance_id]
        engine.is_excused = True
        try:
            with anyio.fail_after(self._weights.rollout_weight_ack_timeout_s):
                if self._weights.rollout_weight_reload_method == "restart":
                    return await self._reload_by_restart(engine, request)
                return await engine.client.reload(
                    request, timeout_s=self._weights.rollout_weight_ack_timeout_s
                )
        except TimeoutError as error:
            raise PeerError(
                f"{instance_id} did not acknowledge v{request.policy_version}"
            ) from error
        finally:
            engine.is_excused = False

    async def _reload_by_restart(self, engine: Engine, request: ReloadRequest) -> ReloadAck:
        """Replace the process by one that starts from the version, and have it prove itself.

        `libra.serving.launch` compares the directory with its manifest before the engine loads it.
        """
        instance_id = engine.placement.instance_id
        engine.next_directory = Path(request.weights_directory)
        try:
            self._supervisions[instance_id].restart()
            timings = await engine.replaced()
        finally:
            engine.next_directory = None
        state = await engine.client.state()
        request_id = RequestId(f"probe-{request.nonce}")
        probing_at = clock.now()
        logprobs = await engine.client.prompt_logprobs(
            request.probe_token_ids, request_id=request_id
        )
        total_s = timings.stop_s + timings.load_s + (clock.now() - probing_at)
        return ReloadAck(
            instance_id=instance_id,
            incarnation=state.incarnation,
            run_id=request.run_id,
            nonce=request.nonce,
            policy_version=state.policy_version,
            method="restart",
            strategy=request.strategy,
            lock_wait_s=0.0,
            process_stop_s=timings.stop_s,
            model_load_s=timings.load_s,
            total_s=total_s,
            manifest_hash=state.manifest_hash or "",
            verified=("manifest", "files", "load", "probe"),
            probe_logprobs=logprobs,
        )

    def url_of(self, instance_id: InstanceId) -> str:
        return self._engines[instance_id].url

    def replace(self, instance_id: InstanceId, reason: str) -> None:
        _log.warning("instance_replaced", instance=instance_id, why=reason)
        self._supervisions[instance_id].restart()
