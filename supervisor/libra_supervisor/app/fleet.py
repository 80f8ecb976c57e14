"""The vLLM servers of a run: one supervision per instance, and what the loop asks of them.

Instances come (`add`) and go (`retire`) while the run goes on. What is asked of one that has gone
is a PeerError: whoever asks has not heard of it yet.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Final, Self, TypeAlias

import anyio
from anyio.abc import TaskGroup

from libra import clock
from libra.config.supervision import SupervisionConfig
from libra.config.weights import WeightsConfig
from libra.errors import LibraError, PeerError
from libra.ids import ChildId, Incarnation, InstanceId, RequestId
from libra.planner.plan import InstancePlacement
from libra.tracing.log import get_log
from libra.wire.instance import InstanceState, ReloadAck, ReloadRequest
from libra_supervisor.app.drain_watch import DrainWatch
from libra_supervisor.app.engine import Engine
from libra_supervisor.events import (
    ChildEvent,
    InstanceAsleep,
    InstanceDrained,
    InstanceRetired,
    InstanceWarmed,
    InstanceWoken,
)
from libra_supervisor.instances.client import InstanceClient
from libra_supervisor.instances.metrics import server_metrics
from libra_supervisor.instances.request_watch import RequestWatch
from libra_supervisor.process.lifecycle import Adoptee, ChildState, ChildStatus, deadlines_from
from libra_supervisor.process.restart import RestartBudget, policy_from
from libra_supervisor.process.spawn import Spawner
from libra_supervisor.process.supervise import Supervision

METRICS_TIMEOUT_S: Final = 5.0
WARM_POLL_S: Final = 0.1

_OVER: Final = (ChildState.GAVE_UP, ChildState.UNKILLABLE)

FleetEvent: TypeAlias = (
    ChildEvent | InstanceRetired | InstanceWarmed | InstanceDrained | InstanceAsleep | InstanceWoken
)
MakeEngine: TypeAlias = Callable[[InstancePlacement, bool], Engine]

_log = get_log()


class Fleet:
    """`libra_supervisor.ports.Engines` over real servers. An asynchronous context manager."""

    def __init__(  # noqa: PLR0913 - the parts of every server's life
        self,
        placements: Sequence[InstancePlacement],
        *,
        make: MakeEngine,
        config: SupervisionConfig,
        spawner: Spawner,
        weights: WeightsConfig,
        watch: DrainWatch,
        post: Callable[[FleetEvent], Awaitable[None]],
        rng: Random,
    ) -> None:
        """`make` makes the engine of an instance, with its devices or without."""
        self._make = make
        self._config = config
        self._spawner = spawner
        self._weights = weights
        self._watch = watch
        self._post = post
        self._rng = rng
        self._tasks: TaskGroup | None = None
        self._is_stopping = False
        self._engines: dict[InstanceId, Engine] = {}
        self._supervisions: dict[InstanceId, Supervision] = {}
        self._retiring: set[InstanceId] = set()
        self._calls: dict[InstanceId, anyio.CancelScope] = {}
        """To sleep or to wake up, on their way."""

        for placement in placements:
            self._enter(placement, has_devices=True)

    def _enter(self, placement: InstancePlacement, *, has_devices: bool) -> Supervision:
        engine = self._make(placement, has_devices)
        supervision = Supervision(
            ChildId(placement.instance_id),
            engine,
            spawner=engine.spawner or self._spawner,
            budget=RestartBudget(policy_from(self._config)),
            deadlines=deadlines_from(self._config),
            post=self._post,
            rng=self._rng,
        )
        self._engines[placement.instance_id] = engine
        self._supervisions[placement.instance_id] = supervision
        return supervision

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

    def required_facts(self) -> dict[ChildId, dict[str, str]]:
        """By server of the plan: what a running process must have been started with to go on."""
        return {ChildId(it): engine.required_facts() for it, engine in self._engines.items()}

    def start(self, tasks: TaskGroup, adopt: Mapping[ChildId, Adoptee]) -> None:
        """Begin every instance's life, with the process in `adopt` if any; side by side.

        `tasks` owns the lives of those that come later too.
        """
        self._tasks = tasks
        for instance_id, supervision in self._supervisions.items():
            tasks.start_soon(supervision.run, adopt.get(ChildId(instance_id)))

    def stop(self) -> None:
        """Drain and end every server; called again, in a hurry. None is added after it."""
        self._is_stopping = True
        for supervision in self._supervisions.values():
            supervision.stop()

    async def until_down(self) -> None:
        for supervision in list(self._supervisions.values()):
            await supervision.until_down()

    def status_of(self, instance_id: InstanceId) -> ChildStatus:
        supervision = self._supervisions.get(instance_id)
        if supervision is None:
            return ChildStatus(
                child_id=ChildId(instance_id), state=ChildState.DOWN, since=clock.now()
            )
        return supervision.status()

    def client_of(self, instance_id: InstanceId) -> InstanceClient:
        return self._engine_of(instance_id).client

    def watch_of(self, instance_id: InstanceId) -> RequestWatch:
        """Signs of life of requests there."""
        return self._engine_of(instance_id).watch.requests

    def _engine_of(self, instance_id: InstanceId) -> Engine:
        engine = self._engines.get(instance_id)
        if engine is None:
            raise PeerError(f"{instance_id} is no part of the run any more")
        return engine

    def patience_with(
        self, instance_id: InstanceId, request_id: RequestId
    ) -> AbstractContextManager[None]:
        """Wait within it for an answer; PeerError when the server lost the request."""
        return self.watch_of(instance_id).patience(request_id)

    def url_or_none(self, instance_id: InstanceId) -> str | None:
        """The address of the newest process; None for one that is unknown or not started."""
        engine = self._engines.get(instance_id)
        return engine.url if engine is not None and engine.is_started else None

    def tp_of(self, instance_id: InstanceId) -> int:
        return self._engine_of(instance_id).placement.tp

    def note_progress(self, instance_id: InstanceId) -> None:
        """A request was served: failures before it no longer count as a row."""
        if (supervision := self._supervisions.get(instance_id)) is not None:
            supervision.note_progress()

    # Members that come and go

    def add(self, placement: InstancePlacement, *, has_devices: bool) -> None:
        tasks = self._tasks
        if tasks is None or self._is_stopping:
            return
        engine = self._engines.get(placement.instance_id)
        if engine is not None and self.status_of(placement.instance_id).state in _OVER:
            tasks.start_soon(engine.close)  # it was given up; this is another life
        elif engine is not None:
            tasks.start_soon(engine.give_devices)
            return
        supervision = self._enter(placement, has_devices=has_devices)
        _log.info("instance_added", instance=placement.instance_id, slots=placement.slots)
        tasks.start_soon(supervision.run)
        if not has_devices:
            tasks.start_soon(self._announce_warm, placement.instance_id)

    def drain(self, instance_id: InstanceId, *, gives_back: bool) -> None:
        if self._tasks is not None:
            self._watch.begin(instance_id, tasks=self._tasks, gives_back=gives_back)

    def keep(self, instance_id: InstanceId) -> None:
        self._watch.end(instance_id)

    def retire(self, instance_id: InstanceId) -> None:
        if self._tasks is None or instance_id in self._retiring:
            return
        self._retiring.add(instance_id)
        self._tasks.start_soon(self._retire, instance_id)

    def sleep(self, instance_id: InstanceId) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(self._sleep, instance_id)

    async def _sleep(self, instance_id: InstanceId) -> None:
        if instance_id in self._calls:
            return  # it has been asked
        self._watch.end(instance_id)
        incarnation = self.status_of(instance_id).incarnation
        with self._call(instance_id):
            try:
                if incarnation is None:
                    raise PeerError(f"{instance_id} has no process that could sleep")
                engine = self._engine_of(instance_id)
                await engine.slumber.begin(engine.client)
            except LibraError as error:
                _log.warning("instance_does_not_sleep", instance=instance_id, why=str(error))
                self.retire(instance_id)
                return
            _log.info("instance_asleep", instance=instance_id)
            await self._post(InstanceAsleep(instance_id, incarnation))

    def wake(self, instance_id: InstanceId) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(self._wake, instance_id)

    async def _wake(self, instance_id: InstanceId) -> None:
        if instance_id in self._retiring:
            return  # it has ended in its sleep, and its retirement says what to do next
        incarnation = self.status_of(instance_id).incarnation
        with self._call(instance_id):
            try:
                engine = self._engine_of(instance_id)
                await engine.slumber.end(engine.client)
            except LibraError as error:
                self.replace(instance_id, f"it does not wake up: {error}")
                return
            _log.info("instance_woken", instance=instance_id)
            await self._post(InstanceWoken(instance_id, incarnation or Incarnation("")))

    @contextmanager
    def _call(self, instance_id: InstanceId) -> Iterator[None]:
        """Whatever is done within it ends when the instance is retired."""
        with anyio.CancelScope() as scope:
            self._calls[instance_id] = scope
            try:
                yield
            finally:
                del self._calls[instance_id]

    async def _retire(self, instance_id: InstanceId) -> None:
        self._watch.end(instance_id)
        if (scope := self._calls.get(instance_id)) is not None:
            scope.cancel()
        supervision = self._supervisions.get(instance_id)
        is_clean = True
        if supervision is not None:
            supervision.stop()
            await supervision.until_down()
            is_clean = supervision.status().state is not ChildState.UNKILLABLE
            del self._supervisions[instance_id]
            await self._engines.pop(instance_id).close()
        self._retiring.discard(instance_id)
        _log.info("instance_retired", instance=instance_id, is_clean=is_clean)
        await self._post(InstanceRetired(instance_id, is_clean))

    async def _announce_warm(self, instance_id: InstanceId) -> None:
        while (engine := self._engines.get(instance_id)) is not None:
            if engine.is_warm:
                await self._post(InstanceWarmed(instance_id))
                return
            await clock.sleep(WARM_POLL_S)

    # libra_supervisor.ports.Engines

    async def ask_state(self, instance_id: InstanceId) -> InstanceState:
        return await self.client_of(instance_id).state()

    async def ask_kv_capacity(self, instance_id: InstanceId) -> int | None:
        page = await self.client_of(instance_id).metrics_text(timeout_s=METRICS_TIMEOUT_S)
        incarnation = self.status_of(instance_id).incarnation or Incarnation("")
        metrics = server_metrics(page, incarnation=incarnation, sampled_at=clock.now())
        return metrics.load.kv_capacity_tokens

    async def reload(self, instance_id: InstanceId, request: ReloadRequest) -> ReloadAck:
        engine = self._engine_of(instance_id)
        engine.watch.reload_begun_at = begun_at = clock.now()
        try:
            with anyio.fail_after(self._weights.rollout_weight_ack_timeout_s):
                if self._weights.rollout_weight_reload_method == "restart":
                    return await self._reload_by_restart(engine, request)
                ack = await engine.client.reload(
                    request, timeout_s=self._weights.rollout_weight_ack_timeout_s
                )
        except TimeoutError as error:
            raise PeerError(
                f"{instance_id} did not acknowledge v{request.policy_version}"
            ) from error
        finally:
            engine.watch.reload_begun_at = None
        longest_s = engine.watch.longest_reload_s
        engine.watch.longest_reload_s = max(longest_s, clock.now() - begun_at)
        return ack

    async def _reload_by_restart(self, engine: Engine, request: ReloadRequest) -> ReloadAck:
        """Replace the process by one that starts from the version, and have it prove itself.

        `libra.serving.launch` compares the directory with its manifest before the engine loads it.
        """
        instance_id = engine.placement.instance_id
        self._supervisions[instance_id].restart()
        timings = await engine.replaced(Path(request.weights_directory))
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

    def loading_directories(self) -> frozenset[Path]:
        loading = (engine.loading_directory for engine in self._engines.values())
        return frozenset(directory for directory in loading if directory is not None)

    def url_of(self, instance_id: InstanceId) -> str:
        return self._engine_of(instance_id).url

    def replace(self, instance_id: InstanceId, reason: str) -> None:
        if instance_id not in self._supervisions or instance_id in self._retiring:
            return  # it is on its way out, or has gone
        _log.warning("instance_replaced", instance=instance_id, why=reason)
        self._supervisions[instance_id].restart()
