#!/usr/bin/env python3
"""The gateway alone, over engines that are given by port; prints its own port."""

import resource
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "supervisor")]

import anyio  # noqa: E402 - after the path is set
from aiohttp import web  # noqa: E402

from libra import clock  # noqa: E402
from libra.config.rollout import SchedulingConfig  # noqa: E402
from libra.ids import Incarnation, InstanceId, PolicyVersion, RequestId  # noqa: E402
from libra.scheduling.scheduler import Scheduler  # noqa: E402
from libra.scheduling.slot import InstanceSpec  # noqa: E402
from libra_supervisor.gateway.gateway import Gateway, GatewayOptions  # noqa: E402
from libra_supervisor.gateway.waiting import WaitingRoom  # noqa: E402
from libra_supervisor.instances.request_watch import RequestWatch  # noqa: E402


async def serve(ports: list[int]) -> None:
    scheduler = Scheduler(SchedulingConfig(prefix_affinity=True))
    url_of: dict[InstanceId, str] = {}
    for port in ports:
        name = InstanceId(f"engine-{port}")
        url_of[name] = f"http://127.0.0.1:{port}"
        spec = InstanceSpec(
            instance_id=name,
            incarnation=Incarnation("1"),
            policy_version=PolicyVersion(0),
            is_ready=True,
        )
        scheduler.observe_instance(spec, clock.now())
    options = GatewayOptions(
        model_names=("policy",),
        max_model_len=131072,
        chat_default_tokens=1024,
        queue_deadline_s=600.0,
    )
    room = WaitingRoom(scheduler)
    watches = {name: RequestWatch(rng=Random(name)) for name in url_of}  # noqa: S311 - jitter

    def patience_with(name: InstanceId, request_id: RequestId) -> AbstractContextManager[None]:
        return watches[name].patience(request_id)

    async with (
        anyio.create_task_group() as tg,
        Gateway(room, url_of.get, patience_with, options) as gateway,
    ):
        tg.start_soon(room.run)
        app = web.Application()
        app.add_routes(gateway.routes())
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=8192).start()
        print(runner.addresses[0][1], flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    engine_ports = [int(port) for port in sys.argv[1:]]
    anyio.run(serve, engine_ports, backend_options={"use_uvloop": True})
