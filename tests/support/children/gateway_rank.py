"""One supervisor's rollout side as a process: scheduler, pollers, load exchange and gateway.

    gateway_rank.py DIRECTORY RANK URL...

It takes the servers at the URLs into its fleet as they describe themselves, and prints its port.
`GET /view` answers what it has in flight itself (`own`), what it believes of the others (`remote`),
by instance, and the other ranks that it takes for living.
"""

import sys
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "supervisor"), str(ROOT / "tests/support")]

import aiohttp  # noqa: E402 - after the path is set
import anyio  # noqa: E402
import msgspec  # noqa: E402
from aiohttp import web  # noqa: E402

from fleets import scheduling  # noqa: E402
from libra import clock  # noqa: E402
from libra.scheduling.scheduler import Scheduler  # noqa: E402
from libra.scheduling.slot import InstanceSpec  # noqa: E402
from libra_supervisor.gateway.gateway import Gateway, GatewayOptions  # noqa: E402
from libra_supervisor.gateway.waiting import WaitingRoom  # noqa: E402
from libra_supervisor.instances.client import InstanceClient  # noqa: E402
from libra_supervisor.instances.poller import InstancePoller  # noqa: E402
from libra_supervisor.instances.request_watch import RequestWatch  # noqa: E402
from libra_supervisor.shared_load.directory import SharedDirectory  # noqa: E402
from libra_supervisor.shared_load.exchange import LoadExchange  # noqa: E402


class GatewayRank:
    def __init__(self, directory: str, rank: str) -> None:
        self.config = scheduling(
            # Shared load alone: what feedback adds depends on when each server was last asked.
            enable_metrics_feedback=False,
            prefix_affinity=True,
            shared_load_dir=directory,
            shared_load_ttl_s=8.0,
            shared_load_heartbeat_s=0.3,
            shared_load_cache_ttl_s=0.1,
        )
        self.scheduler = Scheduler(self.config)
        self.room = WaitingRoom(self.scheduler)
        writer = f"{Random().getrandbits(64):016x}"
        files = SharedDirectory(Path(directory), rank=rank, writer=writer)
        self.exchange = LoadExchange(self.scheduler, files, self.config, rank=rank, writer=writer)
        self.url_of = {}
        self.watch_of = {}

    async def join(self, tasks, url: str) -> None:
        """Take one server into the fleet and watch it."""
        name = await name_of(url)
        client = InstanceClient(name, url, token="secret")
        await client.__aenter__()
        state = await client.state()
        spec = InstanceSpec(
            instance_id=name,
            incarnation=state.incarnation,
            policy_version=state.policy_version,
            is_ready=True,
        )
        self.url_of[name] = url
        self.watch_of[name] = RequestWatch(rng=Random())
        tasks.start_soon(self.watch_of[name].run, client)
        self.scheduler.observe_instance(spec, clock.now())

        def take(polled) -> None:
            if polled.metrics is not None:
                self.scheduler.on_snapshot(name, polled.metrics.load, polled.at)

        poller = InstancePoller(
            client,
            state.incarnation,
            take,
            period_s=self.config.metrics_poll_interval_s,
            timeout_s=self.config.metrics_request_timeout_s,
            rng=Random(),
        )
        tasks.start_soon(poller.run)

    def patience_with(self, name, request_id):
        return self.watch_of[name].patience(request_id)

    async def view(self, _request: web.Request) -> web.Response:
        views = self.scheduler.instances(clock.now())
        content = {
            "own": {v.instance_id: v.own_requests for v in views},
            "remote": {v.instance_id: v.remote_requests for v in views},
            "live_ranks": self.exchange.status().live_ranks,
        }
        return web.Response(body=msgspec.json.encode(content))


async def name_of(url: str) -> str:
    async with (
        aiohttp.ClientSession(trust_env=False) as session,
        session.get(url + "/health") as answer,
    ):
        return answer.headers["X-Libra-Instance"]


async def main(directory: str, rank: str, *urls: str) -> None:
    me = GatewayRank(directory, rank)
    options = GatewayOptions(
        model_names=("policy",), max_model_len=4096, chat_default_tokens=64, queue_deadline_s=30.0
    )
    async with anyio.create_task_group() as tasks:
        for url in urls:
            await me.join(tasks, url)
        async with Gateway(me.room, me.url_of.get, me.patience_with, options) as gateway:
            app = web.Application()
            app.add_routes([*gateway.routes(), web.get("/view", me.view)])
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            tasks.start_soon(me.room.run)
            tasks.start_soon(me.exchange.run)
            print(runner.addresses[0][1], flush=True)
            await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
