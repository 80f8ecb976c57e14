"""The vLLM servers of a run: one supervision per instance, and what the loop asks of them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Final, Self

import anyio
from anyio.abc import TaskGroup

from libra import clock
from libra.config.supervision import SupervisionConfig
from libra.config.weights import WeightsConfig
from libra.errors import PeerError
from libra.ids import ChildId, Incarnation, InstanceId, RequestId
from libra.tracing.log import get_log
from libra.wire.instance import InstanceState, ReloadAck, ReloadRequest
from libra_supervisor.app.engine import Engine
from libra_supervisor.events import ChildEvent
from libra_supervisor.instances.client import InstanceClient
from libra_supervisor.instances.metrics import server_metrics
from libra_supervisor.instances.request_watch import RequestWatch
from libra_supervisor.process.lifecycle import Adoptee, ChildStatus, deadlines_from
from libra_supervisor.process.restart import RestartBudget, policy_from
from libra_supervisor.process.spawn import Spawner
from libra_supervisor.process.supervise import Supervision

METRICS_TIMEOUT_S: Final = 5.0

_log = get_log()


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

    def required_facts(self) -> dict[ChildId, dict[str, str]]:
        """By server of the plan: what a running process must have been started with to go on."""
        return {ChildId(it): engine.required_facts() for it, engine in self._engines.items()}

    def start(self, tasks: TaskGroup, adopt: Mapping[ChildId, Adoptee]) -> None:
        """Begin every instance's life, with the process in `adopt` if any; side by side."""
        for instance_id, supervision in self._supervisions.items():
            tasks.start_soon(supervision.run, adopt.get(ChildId(instance_id)))

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

    def watch_of(self, instance_id: InstanceId) -> RequestWatch:
        """Signs of life of requests there."""
        return self._engines[instance_id].watch

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
        engine.reload_begun_at = begun_at = clock.now()
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
            engine.reload_begun_at = None
        engine.longest_reload_s = max(engine.longest_reload_s, clock.now() - begun_at)
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
        return self._engines[instance_id].url

    def replace(self, instance_id: InstanceId, reason: str) -> None:
        _log.warning("instance_replaced", instance=instance_id, why=reason)
        self._supervisions[instance_id].restart()
