"""One burst of samples on a real fleet of unequal servers, by scheduling options."""

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
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
from real_servers import RealServer, RunFiles

POLL_S = 0.25
NUM_PROMPT_TOKENS = 40
NUM_SAMPLES, NUM_IN_FLIGHT = 64, 48
WIDE, NARROW = "i0", "i1"
NARROW_ARGS = (
    "--block-size", "32",
    "--num-gpu-blocks-override", "10",  # vLLM keeps one, so 288 tokens
    "--max-model-len", "256",  # a longest request must fit
)  # fmt: skip

STRATEGIES: dict[str, dict[str, object]] = {
    "round_robin": {"load_balance_strategy": "round_robin"},
    "requests": {"load_metric": "requests"},
    "kv_tokens": {"load_metric": "kv_tokens", "enable_metrics_feedback": True},
}


def output_lengths() -> list[int]:
    rng = Random(4)
    return [rng.choice((60, 120, 200)) for _ in range(NUM_SAMPLES)]


@asynccontextmanager
async def unequal_servers(files: RunFiles) -> AsyncGenerator[tuple[RealServer, RealServer]]:
    """WIDE with room to spare, and NARROW whose KV cache holds one or two samples."""
    wide = RealServer(files, WIDE, core=0)
    narrow = RealServer(files, NARROW, core=1, extra_args=NARROW_ARGS)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wide.until_ready)
            tasks.start_soon(narrow.until_ready)
        yield wide, narrow
    finally:
        wide.kill()
        narrow.kill()


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """What one burst was like; all but the seconds by instance."""

    seconds: float
    num_samples: dict[str, int]
    num_preemptions: dict[str, float]
    most_reserved_fraction: dict[str, float]
    """Largest share of its KV capacity that was reserved on an instance at one time."""


async def burst(
    servers: Sequence[RealServer],
    *,
    output_lengths: Sequence[int],
    seed: int,
    num_in_flight: int = NUM_IN_FLIGHT,
    **options: object,
) -> Burst:
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
        before, began = await run.preemptions(), clock.now()
        places = anyio.Semaphore(num_in_flight)
        async with anyio.create_task_group() as samples:
            for k, length in enumerate(output_lengths):
                samples.start_soon(run.sample, k, length, seed, places)
        seconds = clock.now() - began
        after = await run.preemptions()
        tasks.cancel_scope.cancel()
    return Burst(
        seconds=seconds,
        num_samples=dict(run.num_by_instance),
        num_preemptions={name: after[name] - before[name] for name in after},
        most_reserved_fraction=dict(run.most_reserved),
    )


class _Run:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.room = WaitingRoom(scheduler)
        self.clients: dict[str, InstanceClient] = {}
        self.num_by_instance: Counter[str] = Counter()
        self.most_reserved: dict[str, float] = dict.fromkeys((WIDE, NARROW), 0.0)

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
            look = await self.look(server.name)
            self.scheduler.on_snapshot(look.instance_id, look.metrics.load, look.at)

    async def look(self, name: str) -> Polled:
        look = await self.poller(name, self.clients[name])._look()
        assert look.metrics is not None, look.error
        return look

    async def preemptions(self) -> dict[str, float]:
        """The servers' own counters."""
        looks = {name: await self.look(name) for name in self.clients}
        return {name: look.metrics.load.num_preemptions for name, look in looks.items()}

    def poller(self, name: str, client: InstanceClient) -> InstancePoller:
        return InstancePoller(
            client, Incarnation("first"), self.take, period_s=POLL_S, timeout_s=5.0,
            rng=Random(name),
        )  # fmt: skip

    def take(self, polled: Polled) -> None:
        if polled.metrics is not None:
            self.scheduler.on_snapshot(polled.instance_id, polled.metrics.load, polled.at)

    def note_reserved(self) -> None:
        for view in self.scheduler.instances(clock.now()):
            fraction = view.own_tokens / view.kv_capacity_tokens
            most = self.most_reserved[view.instance_id]
            self.most_reserved[view.instance_id] = max(most, fraction)

    async def sample(self, k: int, length: int, seed: int, places: anyio.Semaphore) -> None:
        prompt = [10 + (7 * k + 3 * t) % 400 for t in range(NUM_PROMPT_TOKENS)]
        wanted = RouteRequest(
            request_id=RequestId(f"s{seed}-{k}"),
            max_new_tokens=length,
            num_prompt_tokens=len(prompt),
        )
        async with places, self.room.place(wanted) as placement:
            name = placement.reservation.instance_id
            self.note_reserved()
            sampling = Sampling(max_new_tokens=length, seed=seed + k)
            answer = await self.clients[name].complete(
                prompt, sampling, request_id=wanted.request_id
            )
            placement.complete(len(answer.token_ids))
            self.num_by_instance[name] += 1
