"""Whether one server does its work: what it answers, what it gets done, and when it is stuck."""

from collections.abc import Callable
from random import Random
from typing import Final

import anyio

from libra import clock
from libra.config.run import RunConfig
from libra.errors import ChildError, LibraError
from libra.ids import Incarnation, InstanceId, RequestId
from libra.tracing.log import get_log
from libra.wire.instance import Sampling
from libra_supervisor.app.slumber import Slumber
from libra_supervisor.instances.client import InstanceClient
from libra_supervisor.instances.health import Health, HealthMonitor
from libra_supervisor.instances.poller import InstancePoller, Polled
from libra_supervisor.instances.request_watch import RequestWatch

PROBE_TIMEOUT_S: Final = 30.0
RELOAD_FACTOR: Final = 10.0
FIRST_TOKEN: Final = Sampling(max_new_tokens=1, temperature=0.0)

_log = get_log()


class EngineWatch:
    """Looks at the processes of one server, one after the other."""

    def __init__(
        self,
        instance_id: InstanceId,
        config: RunConfig,
        slumber: Slumber,
        *,
        num_in_flight: Callable[[], int],
        show: Callable[[Polled], None],
        rng: Random,
    ) -> None:
        """Every look is shown after it was taken in."""
        self.requests = RequestWatch(rng=rng)
        self.reload_begun_at: float | None = None
        """Since when a reload is asked for: for a while no progress is owed."""

        self.longest_reload_s = 0.0
        self._instance_id = instance_id
        self._config = config
        self._slumber = slumber
        self._num_in_flight = num_in_flight
        self._show = show
        self._rng = rng
        self._was_excused = False

    async def until_stuck(self, client: InstanceClient, incarnation: Incarnation) -> str:
        """Look at the process until it does not do its work; say why."""
        stall_s = self._config.supervision.liveness_stall_s
        monitor = HealthMonitor(stall_s=stall_s, silence_s=stall_s, now=clock.now())
        # So it did when it was ready: one that hangs before the first look is not loading.
        monitor.on_health("healthy", now=clock.now())
        looked = anyio.Event()

        def take(polled: Polled) -> None:
            self._take(polled, monitor)
            looked.set()

        scheduling = self._config.heterogeneous_rollout.scheduling
        poller = InstancePoller(
            client,
            incarnation,
            take,
            period_s=scheduling.metrics_poll_interval_s,
            timeout_s=scheduling.metrics_request_timeout_s,
            rng=self._rng,
            has_load=lambda: not self._slumber.is_on,
        )
        health = Health("loading")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poller.run)
            tasks.start_soon(self.requests.run, client)
            while health.state != "dead":
                await looked.wait()
                looked = anyio.Event()
                health = monitor.health(now=clock.now())
                if health.needs_probe and self._slumber.is_on:
                    health = Health("dead", health.reason)  # it could pass no probe
                elif health.needs_probe:
                    health = await self._doubted(client, monitor)
            tasks.cancel_scope.cancel()
        return health.reason

    async def probe(self, client: InstanceClient) -> None:
        """One forward pass. Raises ChildError when the server cannot do it."""
        request = RequestId(f"probe-{self._instance_id}-{self._rng.getrandbits(32):08x}")
        try:
            await client.complete([0], FIRST_TOKEN, request_id=request)
        except LibraError as error:
            raise ChildError(f"a forward pass fails: {error}") from error

    async def _doubted(self, client: InstanceClient, monitor: HealthMonitor) -> Health:
        monitor.on_probe_sent()
        has_passed = False
        with anyio.move_on_after(PROBE_TIMEOUT_S):
            try:
                await self.probe(client)
                has_passed = True
            except ChildError as error:
                _log.warning("probe_failed", instance=self._instance_id, why=str(error))
        monitor.on_probe(has_passed=has_passed, now=clock.now())
        return monitor.health(now=clock.now())

    def _take(self, polled: Polled, monitor: HealthMonitor) -> None:
        metrics = polled.metrics
        is_excused = self._is_excused(polled.at)
        if is_excused != self._was_excused:
            monitor.on_excused(is_excused=is_excused, now=polled.at)
            self._was_excused = is_excused
        monitor.on_health(polled.health, now=polled.at)
        monitor.on_progress(
            num_tokens=None if metrics is None else metrics.num_tokens,
            num_running=None if metrics is None else metrics.load.num_running,
            # A reload that takes too long is work that does not get done.
            num_in_flight=self._num_in_flight() + (self.reload_begun_at is not None),
            now=polled.at,
        )
        self._show(polled)

    def _is_excused(self, now: float) -> bool:
        """Whether it sleeps, or a reload may still be on its way.

        The first one may take as long as its ACK.

        A later one has a measure: ten times the longest so far, and no less than a stall.
        """
        if self._slumber.is_on:
            return True
        if self.reload_begun_at is None:
            return False
        allowed_s = self._config.weights.rollout_weight_ack_timeout_s
        if self.longest_reload_s:
            usual_s = RELOAD_FACTOR * self.longest_reload_s
            allowed_s = max(self._config.supervision.liveness_stall_s, usual_s)
        return now - self.reload_begun_at < allowed_s
