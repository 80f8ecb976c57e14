"""One scheduler rank as a process: takes places on a shared fleet and says what it knows.

argv: directory, rank, instances, requests. Each line on stdout is a JSON object with `own` and
`remote` requests by instance.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "supervisor"), str(ROOT / "tests/support")]

import anyio  # noqa: E402 - after the path is set

from fleets import fleet_of, place, scheduling  # noqa: E402
from libra import clock  # noqa: E402
from libra_supervisor.shared_load.directory import SharedDirectory  # noqa: E402
from libra_supervisor.shared_load.exchange import LoadExchange  # noqa: E402


async def main(directory: str, rank: str, num_instances: str, num_requests: str) -> None:
    scheduler = fleet_of(int(num_instances), now=clock.now())
    config = scheduling(
        shared_load_dir=directory,
        shared_load_ttl_s=1.5,
        shared_load_heartbeat_s=0.3,
        shared_load_cache_ttl_s=0.1,
    )
    files = SharedDirectory(Path(directory), rank=rank, writer=f"process-{rank}")
    exchange = LoadExchange(scheduler, files, config, rank=rank, writer=f"process-{rank}")
    await exchange.exchange_once()
    for _ in range(int(num_requests)):
        place(scheduler, clock.now())
    async with anyio.create_task_group() as tg:
        tg.start_soon(exchange.run)
        while True:
            views = scheduler.instances(clock.now())
            own = {v.instance_id: v.own_requests for v in views}
            remote = {v.instance_id: v.remote_requests for v in views}
            print(json.dumps({"own": own, "remote": remote}), flush=True)
            await clock.sleep(0.1)


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
