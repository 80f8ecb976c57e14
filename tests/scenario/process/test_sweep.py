import os
import subprocess
import time
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from libra_supervisor.journal import StateFile, SupervisorState
from libra_supervisor.process import sweep
from libra_supervisor.process.cgroup import CgroupRoot
from libra_supervisor.process.identity import identity_of
from libra_supervisor.process.kernel import Linux
from libra_supervisor.process.sweep import end_run, list_leftovers
from libra_supervisor.process.tree import StopDeadlines
from processes import alive, python, site, until

pytestmark = pytest.mark.anyio


def printed_pids(run_dir, child_id):
    path = run_dir / "logs" / f"{child_id}.log"
    return [int(word) for word in path.read_text().split()] if path.exists() else []


@pytest.mark.case("R-B76", "R-B96")
async def test_everything_of_a_run_is_ended_but_what_is_kept_and_the_relay(tmp_path):
    async with site(tmp_path) as place:
        kept = await place.spawn(*python("tree.py", "1", "1", "setsid"), child_id="vllm-0")
        lost = await place.spawn(*python("tree.py", "2", "1", "setsid", "orphan"), child_id="old")
        lost_pids = await until(lambda: (p := printed_pids(tmp_path, "old"))[2:] and p)
        kept_pids = await until(lambda: (p := printed_pids(tmp_path, "vllm-0"))[1:] and p)
        relay = place.logs._process.pid
        survivors = await end_run(place.run_id, Linux(), kept={kept.child_id: kept.identity})
        assert survivors == ()
        assert alive(lost_pids) == []
        assert sorted(alive([*kept_pids, relay])) == sorted([*kept_pids, relay])
        lost.reap()
        kept.reap()


async def test_processes_of_another_run_are_listed_and_left_alone(tmp_path):
    async with site(tmp_path) as place:
        child = await place.spawn(*python("tree.py", "1", "1", "setsid", "orphan"), child_id="x")
        pids = await until(lambda: (p := printed_pids(tmp_path, "x"))[1:] and p)
        listed = {leftover.pid for leftover in await list_leftovers(Linux())}
        # Below this process nothing is a leftover; an orphan is, where no subreaper takes it.
        orphan = next(pid for pid in pids if pid != child.identity.pid)
        assert child.identity.pid not in listed
        is_ours = Path(f"/proc/{orphan}/stat").read_text().split()[3] == str(os.getpid())
        assert (orphan in listed) is not is_ours
        assert alive(pids) == pids


@pytest.mark.case("R-B76", "R-B73")
@pytest.mark.parametrize("is_reused", [False, True])
async def test_the_sweep_after_a_job_takes_no_stranger_for_the_supervisor(tmp_path, is_reused):
    """A process with the dead supervisor's pid does not keep its servers alive."""
    me = identity_of(os.getpid())
    async with site(tmp_path) as place:
        child = await place.spawn("sleep", "60")
        state = SupervisorState(
            run_id=place.run_id,
            written_at_ns=0,
            supervisor_pid=me.pid,
            supervisor_start_ticks=me.start_ticks + is_reused,
            supervisor_boot_id=me.boot_id,
        )
        StateFile(tmp_path / "state.json").save(state)
        code = await anyio.to_thread.run_sync(sweep.main, tmp_path / "state.json")
        assert code == (0 if is_reused else 1)
        assert alive([child.identity.pid]) == ([] if is_reused else [child.identity.pid])
        await child.tree.end(StopDeadlines(term_grace_s=0))
        child.reap()


@pytest.mark.case("R-B76", "R-B51")
async def test_what_a_dead_follower_left_is_swept_by_the_run_of_the_directory(tmp_path):
    """It writes no state: the leader holds it."""
    async with site(tmp_path) as place:
        child = await place.spawn("sleep", "60")
        file = tmp_path / "run_id"

        async def swept(pid):
            return await anyio.to_thread.run_sync(sweep.main_of_follower, file, pid)

        gone = subprocess.Popen(["true"])
        gone.wait()
        assert await swept(gone.pid) == 0, "nobody has begun the run"
        file.write_text(place.run_id)
        assert await swept(os.getpid()) == 1
        assert alive([child.identity.pid])
        assert await swept(gone.pid) == 0
        assert not alive([child.identity.pid])
        await child.tree.end(StopDeadlines(term_grace_s=0))
        child.reap()


def test_the_sweep_says_what_is_wrong_with_a_damaged_state(tmp_path, capsys):
    (tmp_path / "state.json").write_text("{")
    assert sweep.main(tmp_path / "state.json") == 1
    assert "is not a state of this program" in capsys.readouterr().err


def test_tidying_spares_young_and_foreign_groups(tmp_path):
    old = f"libra-vllm-0-{time.monotonic_ns() - 61_000_000_000:x}"
    young = f"libra-vllm-0-{time.monotonic_ns():x}"
    for name in (old, young, "libra-by-hand", "other.service"):
        (tmp_path / name).mkdir()
    CgroupRoot(str(tmp_path)).tidy()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [young, "libra-by-hand", "other.service"]
    )
