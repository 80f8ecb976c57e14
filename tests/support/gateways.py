"""A running gateway over fake engines, for tests that speak HTTP to it."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

import aiohttp
import anyio
from aiohttp import web

from fake_upstream import FakeUpstream
from fleets import fleet_of
from libra import clock
from libra.ids import InstanceId
from libra.scheduling.scheduler import Scheduler
from libra_supervisor.gateway.gateway import Gateway, GatewayOptions, Patience
from libra_supervisor.gateway.upstream import PhaseLimits
from libra_supervisor.gateway.waiting import WaitingRoom


@dataclass
class RunningGateway:
    scheduler: Scheduler
    engines: Sequence[FakeUpstream]
    url: str
    client: aiohttp.ClientSession

    async def post(self, body: object, *, path: str = "/v1/completions", **headers: str):
        """Status, headers and JSON of one whole answer."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(self.url + path, json=body, headers=names) as answer:
            return answer.status, answer.headers, await answer.json()


@asynccontextmanager
async def running_gateway(
    *engines: FakeUpstream,
    host: str = "127.0.0.1",
    limits: PhaseLimits | None = None,
    queue_deadline_s: float = 5.0,
    patience_with: Patience = lambda *_: nullcontext(),
    **scheduling: object,
) -> AsyncGenerator[RunningGateway]:
    """Serve `engines`, which are running and named i0, i1, ..., behind one gateway."""
    scheduler = fleet_of(len(engines), now=clock.now(), **scheduling)
    url_of = {InstanceId(engine.name): engine.url for engine in engines}
    options = GatewayOptions(
        model_names=("policy",),
        max_model_len=4096,
        chat_default_tokens=256,
        queue_deadline_s=queue_deadline_s,
        limits=limits or PhaseLimits(),
    )
    room = WaitingRoom(scheduler)
    async with (
        anyio.create_task_group() as tg,
        Gateway(room, url_of.get, patience_with, options) as gateway,
    ):
        tg.start_soon(room.run)
        app = web.Application()
        app.add_routes(gateway.routes())
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, 0).start()
            port = runner.addresses[0][1]
            shown = f"[{host}]" if ":" in host else host
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), trust_env=False
            ) as client:
                yield RunningGateway(scheduler, engines, f"http://{shown}:{port}", client)
        finally:
            await runner.cleanup()
            tg.cancel_scope.cancel()


async def eventually(is_true, within_s=10.0):
    with anyio.fail_after(within_s):
        while not is_true():
            await clock.sleep(0.005)
