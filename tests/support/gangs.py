"""Real gangs of small processes for tests."""

import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import anyio
import msgspec

from libra.config.supervision import SupervisionConfig
from libra.ids import SlotId
from libra.planner.plan import TrainPlacement
from libra.wire.rank import StepTrained
from libra_supervisor.events import GangReady, RankSaid
from libra_supervisor.ranks.gang import Gang
from libra_supervisor.ranks.torchrun import GangSite
from libra_supervisor.run_directory import RunDirectory
from processes import CHILDREN, until


def config(**changes):
    values = {
        "start_timeout_s": 10,
        "drain_timeout_s": 5,
        "term_grace_s": 2,
        "kill_wait_s": 5,
        "restart_backoff_initial_s": 0.02,
        "restart_backoff_max_s": 0.05,
        **changes,
    }
    return msgspec.convert(values, SupervisionConfig)


@asynccontextmanager
async def gang_in(place, run_dir, *, misbehaves=None, world_size=2, restores=(), **changes):
    directory = RunDirectory(run_dir)
    directory.create()
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p),
        "FAKE_RANK": msgspec.json.encode(misbehaves or {}).decode(),
    }
    launcher = changes.pop("launcher", (sys.executable, str(CHILDREN / "fake_torchrun.py")))
    is_restarted = changes.pop("is_restarted", True)
    program = changes.pop("program", (str(CHILDREN / "fake_rank.py"),))
    gang_site = GangSite(
        run_id=place.run_id,
        directory=directory,
        placement=TrainPlacement(
            tp=1, pp=1, cp=1, ep=1, dp=world_size, slots=tuple(map(SlotId, range(world_size)))
        ),
        device="cpu",
        env=env,
        launcher=launcher,
        program=program,
        is_restarted=is_restarted,
    )

    async def choose(attempt):
        return restores[attempt - 1] if attempt <= len(restores) else None

    gang = Gang(
        gang_site,
        spawner=place.spawner,
        config=config(**changes),
        choose=choose,
        post=place.post,
        rng=Random(5),
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gang.run)
        yield gang
        with anyio.fail_after(30):
            await gang.until_down()


def of(place, kind):
    return [event for event in place.posted if isinstance(event, kind)]


def trained(place, attempt):
    return sorted(
        said.event.rank
        for said in of(place, RankSaid)
        if said.attempt == attempt and isinstance(said.event, StepTrained)
    )


async def ready(place, num=1, *, within_s=15):
    """Until the `num`-th attempt has all its ranks."""
    await until(lambda: len(of(place, GangReady)) == num, within_s=within_s)
