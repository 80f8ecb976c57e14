"""How long one burst of samples takes on a real fleet of unequal servers, by scheduling options."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from random import Random

import anyio
import msgspec

from fleets import scheduling
from libra import clock
from libra.ids import Incarnation, InstanceId, PolicyVersion, RequestId
from libra.scheduling.request import RouteRequest
from libra.scheduling.scheduler import Scheduler
from libra.scheduling.slot import InstanceSpec
from libra.wire.instance import Sampling
from libra_supervisor.gateway.waiting import WaitingRoom
from libra_supervisor.instances.client import InstanceClient
from libra_supervisor.instances.poller import InstancePoller, Polled
from real_servers import RealServer

POLL_S = 0.25
NUM_PROMPT_TOKENS = 40


class Makespan(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    num_by_instance: dict[str, int]


async def makespan(
    servers: Sequence[RealServer],
    *,
    output_lengths: Sequence[int],
    num_in_flight: int,
    seed: int,
    **options: object,
) -> Makespan:
    """Run one sample per entry of `output_lengths`, `num_in_flight` at a time."""
    config = scheduling(metrics_poll_interval_s=POLL_S, **options)
    run = _Run(Scheduler(config))
    async with AsyncExitStack() as stack:
        for server in servers:
            run.clients[server.name] = await stack.enter_async_context(server.client())
        await run.register(servers)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        tasks.start_soon(run.room.run)
        if config.enable_metrics_feedback:
            for name, client in run.clients.items():
                tasks.start_soon(run.poller(name, client).run)
        began = clock.now()
        places = anyio.Semaphore(num_in_flight)
        async with anyio.create_task_group() as samples:
            for k, length in enumerate(output_lengths):
                samples.start_soon(run.sample, k, length, seed, places)
        seconds = clock.now() - began
        tasks.cancel_scope.cancel()
    return Makespan(seconds=seconds, num_by_instance=dict(run.num_by_instance))


class _Run:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.room = WaitingRoom(scheduler)
        self.clients: dict[str, InstanceClient] = {}
        self.num_by_instance: Counter[str] = Counter()

    async def register(self, servers: Sequence[RealServer]) -> None:
        """Announce the servers, each with the KV capacity that it measured itself."""
        for server in servers:
            spec = InstanceSpec(
                instance_id=InstanceId(server.name),
                incarnation=Incarnation("first"),
                policy_version=PolicyVersion(0),
                is_ready=True,
            )
            self.scheduler.observe_instance(spec, clock.now())
            looks: list[Polled] = []
            look = await self.poller(server.name, self.clients[server.name], looks.append)._look()
            assert look.metrics is not None
            self.scheduler.on_snapshot(look.instance_id, look.metrics.load, look.at)

    def poller(self, name: str, client: InstanceClient, sink=None) -> InstancePoller:
        return InstancePoller(
            client, Incarnation("first"), sink or self.take, period_s=POLL_S, timeout_s=5.0,
            rng=Random(name),
        )  # fmt: skip

    def take(self, polled: Polled) -> None:
        if polled.metrics is not None:
            self.scheduler.on_snapshot(polled.instance_id, polled.metrics.load, polled.at)

    async def sample(self, k: int, length: int, seed: int, places: anyio.Semaphore) -> None:
        prompt = [10 + (7 * k + 3 * t) % 400 for t in range(NUM_PROMPT_TOKENS)]
        wanted = RouteRequest(
            request_id=RequestId(f"s{seed}-{k}"),
            max_new_tokens=length,
            num_prompt_tokens=len(prompt),
        )
        async with places, self.room.place(wanted) as placement:
            name = placement.reservation.instance_id
            sampling = Sampling(max_new_tokens=length, seed=seed + k)
            answer = await self.clients[name].complete(
                prompt, sampling, request_id=wanted.request_id
            )
            placement.complete(len(answer.token_ids))
            self.num_by_instance[name] += 1
