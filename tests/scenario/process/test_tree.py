import os
import signal
import subprocess
import sys

import anyio
import pytest

from libra_supervisor.process.cgroup import delegated_root
from libra_supervisor.process.kernel import read_table, signal_process
from libra_supervisor.process.tree import StopDeadlines
from processes import alive, processes_tagged, python, site, until

pytestmark = pytest.mark.anyio
KILL_AT_ONCE = StopDeadlines(term_grace_s=0, kill_wait_s=5)


def log_of(run_dir, child_id="child"):
    path = run_dir / "logs" / f"{child_id}.log"
    return path.read_text() if path.exists() else ""


async def started_tree(place, run_dir, *arguments, num):
    child = await place.spawn(*python("tree.py", *arguments))
    lines = await until(lambda: (p := log_of(run_dir).split()) and len(p) == num and p)
    return child, [int(pid) for pid in lines]


@pytest.mark.case("R-B57", "R-B49", "R-B51", "R-B95")
@pytest.mark.parametrize("cgroups", [None, delegated_root()], ids=["sweep", "cgroup"])
@pytest.mark.parametrize(
    "modes",
    [["ignore"], ["setsid"], ["setsid", "orphan"], ["setsid", "orphan", "ignore"]],
    ids="-".join,
)
async def test_no_descendant_survives_however_it_hides(tmp_path, modes, cgroups):
    async with site(tmp_path, cgroups=cgroups) as place:
        child, pids = await started_tree(place, tmp_path, "3", "2", *modes, num=13)
        ended = await child.tree.end(KILL_AT_ONCE)
        child.reap()
        assert alive(pids) == []
        assert ended.survivors == ()
        assert ended.num_killed + bool(cgroups) * 13 >= 13


async def test_descendants_without_the_tag_are_found_by_descent(tmp_path):
    async with site(tmp_path) as place:
        child, pids = await started_tree(place, tmp_path, "2", "2", "setsid", "bare", num=7)
        await child.tree.end(KILL_AT_ONCE)
        child.reap()
        assert alive(pids) == []


@pytest.mark.case("R-B49")
async def test_a_leader_killed_by_others_takes_its_hidden_workers_with_it(tmp_path):
    async with site(tmp_path) as place:
        child, pids = await started_tree(place, tmp_path, "2", "2", "setsid", num=7)
        os.kill(child.identity.pid, signal.SIGKILL)
        status = await child.wait()
        assert (status.exit_code, status.signal) == (None, signal.SIGKILL)
        assert len(alive(pids)) == 6
        await child.tree.end(KILL_AT_ONCE)
        child.reap()
        assert alive(pids) == []


async def test_orphans_without_a_tag_are_remembered_from_before_the_leader_died(tmp_path):
    async with site(tmp_path) as place:
        child, pids = await started_tree(place, tmp_path, "2", "1", "setsid", "bare", num=3)
        await child.tree.observe()
        os.kill(child.identity.pid, signal.SIGKILL)
        await child.wait()
        await child.tree.end(KILL_AT_ONCE)
        child.reap()
        assert alive(pids) == []


@pytest.mark.case("R-B56")
async def test_the_leader_gets_one_sigterm_and_its_grace(tmp_path):
    script = (
        "trap 'echo term; sleep 0.3; echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    )
    async with site(tmp_path) as place:
        child = await place.spawn("/bin/sh", "-c", script)
        await until(lambda: "up" in log_of(tmp_path))
        ended = await child.tree.end(StopDeadlines(term_grace_s=5, kill_wait_s=5))
        status = await child.wait()
        child.reap()
        assert ended.ended_in_grace
        assert status.exit_code == 0
        assert (await child.last_lines(9)) == ("up", "term", "bye")


async def test_a_second_request_shortens_the_grace(tmp_path):
    async with site(tmp_path) as place:
        child, pids = await started_tree(place, tmp_path, "0", "0", "ignore", num=1)
        hurry = anyio.Event()
        began_at = anyio.current_time()
        deadlines = StopDeadlines(term_grace_s=30, kill_wait_s=5, hurried_grace_s=0.1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: child.tree.end(deadlines, hurry=hurry))
            await anyio.sleep(0.2)
            hurry.set()
        child.reap()
        assert anyio.current_time() - began_at < 3
        assert alive(pids) == []


@pytest.mark.case("R-B73")
def test_a_pid_with_another_start_time_is_never_signalled():
    stranger = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        row = read_table()[stranger.pid]
        assert not signal_process(stranger.pid, row.start_ticks - 1, signal.SIGKILL)
        assert stranger.poll() is None
        assert signal_process(stranger.pid, row.start_ticks, signal.SIGKILL)
        assert stranger.wait() == -signal.SIGKILL
    finally:
        stranger.communicate()


@pytest.mark.case("R-B50")
async def test_leftovers_of_an_earlier_life_are_found_by_their_tag(tmp_path):
    async with site(tmp_path) as place:
        child, pids = await started_tree(place, tmp_path, "2", "1", "setsid", "orphan", num=3)
        ended = await place.spawner.clear(child.child_id, 5.0)
        child.reap()
        assert ended.survivors == ()
        assert alive(pids) == []
        assert len(processes_tagged(place.run_id)) == 1, "the log relay is not the child's"


SEGMENT = """
from multiprocessing import shared_memory, resource_tracker
import time
s = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(s._name, "shared_memory")
print(s.name, flush=True)
time.sleep(60)
"""


async def test_shared_memory_of_a_killed_tree_is_removed_and_that_of_others_is_kept(tmp_path):
    async with site(tmp_path) as place:
        kept = await place.spawn(sys.executable, "-c", SEGMENT, child_id="kept")
        child = await place.spawn(sys.executable, "-c", SEGMENT)
        names = [(await until(lambda c=c: log_of(tmp_path, c).strip())) for c in ("kept", "child")]
        ended = await child.tree.end(KILL_AT_ONCE)
        child.reap()
        assert ended.removed_segments == (names[1],)
        assert os.path.exists(f"/dev/shm/{names[0]}")
        await kept.tree.end(KILL_AT_ONCE)
        kept.reap()
        assert not os.path.exists(f"/dev/shm/{names[0]}")


SUBREAPER = """
import os, sys
sys.path[:0] = {path!r}
import anyio
from pathlib import Path
from processes import python, site, until
from libra_supervisor.process import kernel
from libra_supervisor.process.spawn import become_subreaper
from libra_supervisor.process.tree import StopDeadlines

def mine():
    return [r for r in kernel.read_table().values() if r.ppid == os.getpid()]

async def main():
    become_subreaper()
    kernel._OLD_ZOMBIE_S = 0.2
    async with site(Path({run_dir!r})) as place:
        child = await place.spawn(*python("tree.py", "2", "1", "setsid", "orphan"))
        log = Path({run_dir!r}) / "logs" / "child.log"
        await until(lambda: log.exists() and len(log.read_text().split()) == 3)
        orphans = len(mine()) - 2
        await child.tree.end(StopDeadlines(term_grace_s=0))
        child.reap()
        left = [r.name for r in mine() if r.pid != place.logs._process.pid]
        stray = await place.spawn("/bin/sh", "-c", "(sleep 0.1 &); sleep 60")
        await until(lambda: any(r.is_dead for r in mine()))
        await anyio.sleep(0.1)
        await stray.tree.observe()
        await anyio.sleep(0.4)
        await stray.tree.observe()
        print(orphans, left, [r.name for r in mine() if r.is_dead], flush=True)
anyio.run(main)
"""


async def test_dead_orphans_are_waited_for_so_that_no_zombie_stays(tmp_path):
    async with site(tmp_path / "outer") as place:
        script = SUBREAPER.format(path=sys.path, run_dir=str(tmp_path / "inner"))
        child = await place.spawn(sys.executable, "-c", script)
        await child.wait()
        lines = await child.last_lines(20)
        child.reap()
        assert lines == ("2 [] []",), lines
