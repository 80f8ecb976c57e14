import json
import os
import signal
import sys

import anyio
import pytest

from libra.errors import ChildError
from libra.ids import ChildId, Incarnation
from libra_supervisor.process import spawn
from libra_supervisor.process.child import ExitStatus
from libra_supervisor.process.identity import ProcessIdentity
from libra_supervisor.process.spec import Limits
from libra_supervisor.process.tree import StopDeadlines
from processes import processes_tagged, python, site, until

pytestmark = pytest.mark.anyio
KILL_AT_ONCE = StopDeadlines(term_grace_s=0, kill_wait_s=5)


async def ended(child):
    status = await child.wait()
    lines = await child.last_lines(50)
    await child.tree.end(KILL_AT_ONCE)
    child.reap()
    return status, lines


@pytest.mark.case("R-B78", "R-B36")
async def test_a_child_gets_tags_and_nothing_that_belongs_to_the_supervisor(tmp_path):
    ours = {
        "NOTIFY_SOCKET": "/run/x",
        "WATCHDOG_USEC": "1",
        "WATCHDOG_PID": "2",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "all_proxy": "http://127.0.0.1:9",
        "KEPT": "yes",
    }
    async with site(tmp_path) as place:
        child = await place.spawn(
            *python("environment.py"), env=ours, limits=Limits(num_open_files=100, cpu_cores=(1,))
        )
        status, lines = await ended(child)
    assert status == ExitStatus(0, None)
    seen = json.loads(lines[0])
    env = {k: v for k, v in seen["env"].items() if k != "LC_CTYPE"}
    assert env == {
        "KEPT": "yes",
        "LIBRA_RUN_ID": place.run_id,
        "LIBRA_CHILD_ID": "child",
        "SPT_NOENV": "1",
    }
    assert seen["sid_is_pid"]
    assert (seen["core"], seen["files"], seen["cores"]) == (0, 100, [1])
    assert len(seen["fds"]) == 4, "standard streams and the one that lists them"


async def test_a_child_that_asks_for_it_keeps_its_proxy(tmp_path):
    async with site(tmp_path) as place:
        child = await place.spawn(
            *python("environment.py"), env={"https_proxy": "http://x"}, keeps_proxy=True
        )
        _, lines = await ended(child)
    assert json.loads(lines[0])["env"]["https_proxy"] == "http://x"


async def test_a_program_that_does_not_exist_is_named_in_the_error(tmp_path):
    async with site(tmp_path) as place:
        with pytest.raises(ChildError, match=r"child does not start: No such file.*/no/program"):
            await place.spawn("/no/program")
        with pytest.raises(ChildError, match="/no/directory"):
            await place.spawner.spawn(
                place.spec("true", cwd="/no/directory"), Incarnation("child-2")
            )


async def test_exit_codes_and_signals_are_told_apart(tmp_path):
    async with site(tmp_path) as place:
        child = await place.spawn(*python("speak.py", r"hello\n", "1", "3"))
        status, lines = await ended(child)
        assert str(status) == "exited with code 3"
        assert set(lines) == {"hello", "last words"}
        child = await place.spawn("/bin/sh", "-c", "kill -SEGV $$")
        status, _ = await ended(child)
        assert str(status) == "killed by SIGSEGV"


async def test_a_process_of_another_supervisor_is_adopted_by_its_identity_only(tmp_path):
    async with site(tmp_path) as place:
        child = await place.spawn("sleep", "60")
        real = child.identity
        forged = ProcessIdentity(real.pid, real.start_ticks + 1, real.boot_id)
        assert await place.spawner.adopt(child.child_id, forged, child.incarnation) is None
        other = ChildId("vllm-7")
        assert await place.spawner.adopt(other, real, child.incarnation) is None, "by its tag"
        adopted = await place.spawner.adopt(child.child_id, real, child.incarnation)
        assert adopted is not None
        os.kill(real.pid, signal.SIGTERM)
        assert await adopted.wait() == ExitStatus(None, None)
        await adopted.tree.end(KILL_AT_ONCE)
        adopted.reap()
        child.reap()
        assert await place.spawner.adopt(child.child_id, real, child.incarnation) is None


async def test_file_descriptors_do_not_grow_with_starts(tmp_path):
    async with site(tmp_path) as place:
        await ended(await place.spawn("true"))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            await ended(await place.spawn("true"))
        assert len(os.listdir("/proc/self/fd")) == before


BOUND = """
import os, sys
sys.path[:0] = {path!r}
import anyio
from pathlib import Path
from processes import site
async def main():
    async with site(Path({run_dir!r})) as place:
        child = await place.spawn("sleep", "60", is_bound_to_supervisor=True)
        print(child.identity.pid, flush=True)
        os.kill(os.getpid(), 9)
anyio.run(main)
"""


async def test_a_bound_child_dies_with_its_supervisor(tmp_path):
    async with site(tmp_path / "outer") as place:
        script = BOUND.format(path=sys.path, run_dir=str(tmp_path / "inner"))
        child = await place.spawn(sys.executable, "-c", script)
        status, lines = await ended(child)
        assert status.signal == signal.SIGKILL
        assert await until(lambda: not os.path.exists(f"/proc/{lines[0]}"))


async def test_a_start_that_hangs_before_its_program_is_ended_and_said(tmp_path, monkeypatch):
    """The shim was stopped, or its directory is on a disk that does not answer."""
    monkeypatch.setattr(spawn, "_SHIM_WAIT_S", 0.3)
    monkeypatch.setattr(spawn, "_shim_argv", lambda *_: ["sleep", "60"])
    async with site(tmp_path) as place:
        with pytest.raises(ChildError, match=r"within 0\.3 s"), anyio.fail_after(5):
            await place.spawn("true")
        assert processes_tagged(place.run_id) == [place.logs._process.pid]
