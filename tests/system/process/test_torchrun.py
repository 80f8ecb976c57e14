import os
import signal
import sys
from pathlib import Path

import pytest

from gangs import gang_in, of, ready, trained
from libra.wire.rank import TrainStep
from libra_supervisor.events import ChildExited, ChildStarted, GangGaveUp, GangLost
from processes import CHILDREN, alive, site, until

pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.timeout(300)]
REAL = {
    "launcher": (sys.executable, "-m", "torch.distributed.run"),
    "program": (str(CHILDREN / "torch_rank.py"),),
    "start_timeout_s": 120,
    "drain_timeout_s": 20,
}
STEP = TrainStep(1, ())


@pytest.mark.case("R-B70")
async def test_ranks_meet_on_a_port_that_torchrun_holds_and_leave_cleanly(tmp_path):
    async with site(tmp_path) as place:
        async with gang_in(place, tmp_path, **REAL) as gang:
            await ready(place, within_s=120)
            await gang.broadcast(STEP)
            await until(lambda: trained(place, 1) == [0, 1])
            gang.stop()
        log = (tmp_path / "logs" / "trainer.log").read_text()
        assert log.count("held by agent: True") == 2
        assert of(place, ChildExited)[0].exit_code == 0


@pytest.mark.case("R-B69")
async def test_a_killed_rank_is_named_and_the_gang_starts_again(tmp_path):
    async with site(tmp_path) as place, gang_in(place, tmp_path, **REAL) as gang:
        await ready(place, within_s=120)
        pids = [hello.pid for hello in gang.members.values()]
        os.kill(gang.members[1].pid, signal.SIGKILL)
        await ready(place, 2, within_s=120)
        assert of(place, GangLost)[0].reason == "rank 1 was killed by signal 9"
        assert alive(pids) == []
        gang.stop()


async def test_the_error_file_of_the_first_failing_rank_is_shown(tmp_path):
    misbehaves = {"rank": 1, "attempts": [1], "does": "raise"}
    budget = {"restart_max_without_progress": 1}
    async with site(tmp_path) as place:
        async with gang_in(place, tmp_path, misbehaves=misbehaves, **REAL, **budget) as gang:
            await ready(place, within_s=150)
            gang.stop()
        assert of(place, GangLost)[0].reason == (
            "rank 1 failed: RuntimeError: the model does not fit"
        )
        assert of(place, GangGaveUp) == []


async def test_torchrun_killed_leaves_no_rank_though_ranks_have_their_own_sessions(tmp_path):
    async with site(tmp_path) as place:
        async with gang_in(place, tmp_path, **REAL) as gang:
            await ready(place, within_s=120)
            pids = [hello.pid for hello in gang.members.values()]
            agent = of(place, ChildStarted)[0].pid
            assert all(os.getsid(pid) == pid for pid in pids)
            os.kill(agent, signal.SIGKILL)
            await until(lambda: of(place, ChildExited), within_s=20)
            assert alive(pids) == []
            gang.stop()
        assert Path(f"/proc/{agent}").exists() is False
