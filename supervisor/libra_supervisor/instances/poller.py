"""One poller for each instance: /metrics and /health, turned into samples.

Pollers run at random phases, so that neither all servers are asked in one instant nor several
supervisors ask one server at once. A poll that fails gives a sample that says so: a missing
number is unknown, and its age shows.
"""

from collections.abc import Callable
from random import Random
from typing import Never, Protocol

import msgspec

from libra import clock
from libra.errors import LibraError, OverloadedError
from libra.ids import Incarnation, InstanceId
from libra_supervisor.instances.health import HealthAnswer
from libra_supervisor.instances.metrics import ServerMetrics, server_metrics


class PolledClient(Protocol):
    """The part of InstanceClient that is polled."""

    @property
    def instance_id(self) -> InstanceId: ...

    async def health(self) -> None: ...

    async def metrics_text(self, *, timeout_s: float) -> str: ...


class Polled(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one instance."""

    instance_id: InstanceId
    incarnation: Incarnation
    at: float
    health: HealthAnswer
    metrics: ServerMetrics | None
    error: str = ""
    """Why there are no metrics or no health, in words."""


class InstancePoller:
    """Looks at one process until it is cancelled, and hands every look to `sink`."""

    def __init__(  # noqa: PLR0913 - whom, how often, and for whom
        self,
        client: PolledClient,
        incarnation: Incarnation,
        sink: Callable[[Polled], None],
        *,
        period_s: float,
        timeout_s: float,
        rng: Random,
        has_load: Callable[[], bool] = lambda: True,
    ) -> None:
        """Without `has_load` nothing but health is asked for."""
        self._has_load = has_load
        self._client = client
        self._incarnation = incarnation
        self._sink = sink
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._rng = rng

    async def run(self) -> Never:
        due_at = clock.now() + self._rng.uniform(0.0, self._period_s)
        while True:
            await clock.sleep_until(due_at)
            self._sink(await self._look())
            # A look that took longer than the period is followed by the next slot, not by a burst.
            num_slots = 1 + int((clock.now() - due_at) // self._period_s)
            due_at += num_slots * self._period_s

    async def _look(self) -> Polled:
        health, health_error = await self._health()
        metrics, metrics_error = await self._metrics() if self._has_load() else (None, "")
        return Polled(
            instance_id=self._client.instance_id,
            incarnation=self._incarnation,
            at=clock.now(),
            health=health,
            metrics=metrics,
            error=health_error or metrics_error,
        )

    async def _health(self) -> tuple[HealthAnswer, str]:
        try:
            await self._client.health()
        except OverloadedError as exc:
            # vLLM answers /health with 503 only when its engine is dead.
            return "unhealthy", str(exc)
        except LibraError as exc:  # a refusal is no answer to this question either
            return "no_answer", str(exc)
        return "healthy", ""

    async def _metrics(self) -> tuple[ServerMetrics | None, str]:
        try:
            text = await self._client.metrics_text(timeout_s=self._timeout_s)
        except LibraError as exc:
            return None, str(exc)
        sampled_at = clock.now()
        metrics = server_metrics(text, incarnation=self._incarnation, sampled_at=sampled_at)
        return metrics, ""
