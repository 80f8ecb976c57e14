import os
import time
from pathlib import Path

import pytest

from libra_supervisor.process.cgroup import CgroupRoot
from libra_supervisor.process.kernel import Linux
from libra_supervisor.process.sweep import end_run, list_leftovers
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


def test_tidying_spares_young_and_foreign_groups(tmp_path):
    old = f"libra-vllm-0-{time.monotonic_ns() - 61_000_000_000:x}"
    young = f"libra-vllm-0-{time.monotonic_ns():x}"
    for name in (old, young, "libra-by-hand", "other.service"):
        (tmp_path / name).mkdir()
    CgroupRoot(str(tmp_path)).tidy()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [young, "libra-by-hand", "other.service"]
    )
