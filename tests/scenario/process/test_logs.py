import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from libra.errors import SiteError
from libra_supervisor.events import LogSinkFailing, LogSinkRecovered
from libra_supervisor.process import logs as logs_module
from libra_supervisor.process.kernel import read_table
from libra_supervisor.process.logs import LogPolicy, open_log_relay
from libra_supervisor.process.tree import StopDeadlines
from processes import alive, python, site, until

pytestmark = pytest.mark.anyio
KILL_AT_ONCE = StopDeadlines(term_grace_s=0, kill_wait_s=5)


@contextmanager
def small_disk(path, size):
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


async def finished(child, *, within_s=10):
    with anyio.fail_after(within_s):
        status = await child.wait()
    lines = await child.last_lines(50)
    await child.tree.end(KILL_AT_ONCE)
    child.reap()
    return status, lines


def of(place, kind):
    return [event for event in place.posted if isinstance(event, kind)]


@pytest.mark.case("R-B58", "R-B59")
async def test_a_full_disk_never_blocks_the_child_and_the_loss_is_counted(tmp_path):
    with small_disk(tmp_path / "logs", "1m"):
        async with site(tmp_path) as place:
            child = await place.spawn(*python("flood.py", "lines", "10"))
            status, lines = await finished(child)
            assert status.exit_code == 0
            assert "done" in lines
            failing = await until(lambda: of(place, LogSinkFailing))
            assert failing[0].child_id == "child"
            assert failing[0].reason in ("No space left on device", "the disk is full")
            # Room again: the log goes on and says what is missing.
            log = tmp_path / "logs" / "child.log"
            os.truncate(log, 1000)
            os.truncate(f"{log}.index", 0)
            await anyio.sleep(0.3)
            await finished(await place.spawn(*python("speak.py", r"again\n", "1", "0")))
            recovered = await until(lambda: of(place, LogSinkRecovered))
            text = log.read_bytes()
            assert b"again\n" in text
            assert b"bytes of output dropped: " in text
            assert 8 << 20 < recovered[0].dropped_bytes < 10 << 20


@pytest.mark.case("R-B60")
async def test_a_line_of_fifty_megabytes_is_kept_whole_on_disk_and_cut_when_shown(tmp_path):
    async with site(tmp_path) as place:
        child = await place.spawn(*python("flood.py", "one", "50"))
        status, lines = await finished(child)
        assert status.exit_code == 0
        log = tmp_path / "logs" / "child.log"
        await until(lambda: log.stat().st_size == (50 << 20) + 5)
        shown = max(lines, key=len)
        assert shown.endswith("[libra: line cut at 64 KiB]")
        assert len(shown) < 65 * 1024
        relay = relay_pid()
        assert relay_rss_bytes(relay) < 120 << 20, "memory is bounded"


def relay_pid():
    (pid,) = [
        pid
        for pid, row in read_table().items()
        if row.ppid == os.getpid()
        and not row.is_dead
        and b"log_relay" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return pid


def relay_rss_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def test_progress_bars_fold_and_bytes_that_are_no_text_do_no_harm(tmp_path):
    async with site(tmp_path) as place:
        child = await place.spawn(*python("flood.py", "bars", "5"))
        _, lines = await finished(child)
        assert set(lines) == {" 50% |#####     |", "done"}
        child = await place.spawn(*python("flood.py", "binary", "1"), child_id="binary")
        status, lines = await finished(child)
        assert status.exit_code == 0
        assert any(r"\x80\x81" in line for line in lines)


async def test_logs_rotate_by_size_and_only_so_many_are_kept(tmp_path):
    policy = LogPolicy(max_bytes=1 << 20, num_kept=2)
    kept = ["child.log", "child.log.1", "child.log.2"]
    directory = tmp_path / "logs"

    def names():
        return sorted(path.name for path in directory.glob("child.log*"))

    async with site(tmp_path, policy=policy) as place:
        await finished(await place.spawn(*python("flood.py", "lines", "10")))
        # The child's end is known before the relay has written the last of it.
        await until(lambda: names() == sorted([*kept, *(f"{name}.index" for name in kept)]))
    assert all((directory / name).stat().st_size <= 1 << 20 for name in kept)


@pytest.mark.case("R-B63")
async def test_a_thousand_rotations_leave_the_relay_idle_with_the_same_descriptors(tmp_path):
    policy = LogPolicy(max_bytes=4096, num_kept=1)
    async with site(tmp_path, policy=policy) as place:
        await finished(await place.spawn("true"))
        relay = relay_pid()
        before = len(os.listdir(f"/proc/{relay}/fd"))
        child = await place.spawn(*python("flood.py", "lines", "8"))
        await finished(child)
        await until(lambda: len(os.listdir(f"/proc/{relay}/fd")) <= before + 2)
        await anyio.sleep(0.3)
        ticks = cpu_ticks(relay)
        await anyio.sleep(1.0)
        assert cpu_ticks(relay) - ticks <= 2, "of 100: it does not spin"


def cpu_ticks(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_children_and_their_logs_outlive_a_relay_that_is_killed(tmp_path):
    talk = "n=0; while :; do n=$((n+1)); echo line $n; sleep 0.02; done"
    async with site(tmp_path) as place:
        child = await place.spawn("/bin/sh", "-c", talk)
        log = tmp_path / "logs" / "child.log"
        await until(lambda: log.exists() and b"line 3\n" in log.read_bytes())
        os.kill(relay_pid(), signal.SIGKILL)
        size = log.stat().st_size
        await until(lambda: log.stat().st_size > size + 200)
        assert alive([child.identity.pid])
        await child.tree.end(KILL_AT_ONCE)
        # The shell may still say that its sleep was killed.
        lines = log.read_text().splitlines()
        numbers = [int(line.split()[1]) for line in lines if line.startswith("line ")]
        child.reap()
        missing = set(range(1, numbers[-1] + 1)) - set(numbers)
        assert numbers == sorted(numbers)
        assert len(missing) <= 2, "the pipe kept what came while no relay ran"


SUPERVISOR = """
import os, sys
sys.path[:0] = {path!r}
import anyio
from pathlib import Path
from processes import site
async def main():
    async with site(Path({run_dir!r})) as place:
        child = await place.spawn("/bin/sh", "-c", {talk!r})
        print(child.identity.pid, child.identity.start_ticks, flush=True)
        await anyio.sleep(60)
anyio.run(main)
"""


@pytest.mark.case("R-B74")
@pytest.mark.parametrize("is_stopped", [False, True])
async def test_logs_outlive_a_supervisor_that_is_killed_and_the_next_one_takes_them_over(
    tmp_path, is_stopped
):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    talk = "n=0; while :; do n=$((n+1)); echo line $n; sleep 0.02; done"
    script = SUPERVISOR.format(path=sys.path, run_dir=str(run_dir), talk=talk)
    first = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(first.stdout.readline().split()[0])
    log = run_dir / "logs" / "child.log"
    try:
        first.kill()
        first.communicate()
        await until(log.exists)
        size = log.stat().st_size
        await until(lambda: log.stat().st_size > size + 200)
        if is_stopped:
            (relay,) = relays_of(run_dir)
            os.kill(relay, signal.SIGSTOP)
        async with site(run_dir) as place:
            assert place.taken_over == {"child"}
            assert (await place.logs.tail("child", 1))[0].startswith("line ")
            size = log.stat().st_size
            await until(lambda: log.stat().st_size > size + 200)
    finally:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not relays_of(run_dir))


def relays_of(run_dir):
    marks = []
    for pid in read_table():
        try:
            cmdline = Path(f"/proc/{pid}/cmdline").read_bytes()
            output = os.readlink(f"/proc/{pid}/fd/1")
        except OSError:
            continue
        if b"log_relay" in cmdline and output.startswith(str(run_dir)):
            marks.append(pid)
    return marks


async def test_a_stopped_relay_costs_the_supervisor_no_more_than_a_bounded_wait(tmp_path):
    async with site(tmp_path) as place:
        child = await place.spawn(*python("speak.py", r"hi\n", "1", "0"))
        await child.wait()
        relay = relay_pid()
        os.kill(relay, signal.SIGSTOP)
        began = time.monotonic()
        assert await child.last_lines(5) == ()
        assert time.monotonic() - began < 3
        os.kill(relay, signal.SIGCONT)
        await finished(child)


TALK = "n=0; while :; do n=$((n+1)); echo line $n; sleep 0.02; done"


@pytest.mark.case("R-B58")
async def test_a_relay_that_was_stopped_is_found_and_goes_on_without_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(logs_module, "_LOOK_PERIOD_S", 0.1)
    monkeypatch.setattr(logs_module, "_SILENCE_S", 0.5)
    async with site(tmp_path) as place:
        child = await place.spawn("/bin/sh", "-c", TALK)
        log = tmp_path / "logs" / "child.log"
        await until(lambda: log.exists() and log.stat().st_size > 20)
        relay = relay_pid()
        os.kill(relay, signal.SIGSTOP)
        size = log.stat().st_size
        await until(lambda: log.stat().st_size > size + 200)
        assert relay_pid() == relay
        await child.tree.end(KILL_AT_ONCE)
        child.reap()
        lines = [line for line in log.read_text().splitlines() if line.startswith("line ")]
        assert lines == [f"line {n}" for n in range(1, len(lines) + 1)]


@pytest.mark.case("R-B58")
async def test_a_relay_that_hangs_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(logs_module, "_LOOK_PERIOD_S", 0.1)
    monkeypatch.setattr(logs_module, "_SILENCE_S", 0.5)
    # A relay that does not go on when it is told to: it hangs in the kernel.
    signal_process = logs_module.signal_process
    monkeypatch.setattr(
        logs_module,
        "signal_process",
        lambda *it: None if it[2] == signal.SIGCONT else signal_process(*it),
    )
    async with site(tmp_path) as place:
        child = await place.spawn("/bin/sh", "-c", TALK)
        log = tmp_path / "logs" / "child.log"
        await until(lambda: log.exists() and log.stat().st_size > 20)
        relay = relay_pid()
        os.kill(relay, signal.SIGSTOP)
        size = log.stat().st_size
        await until(lambda: log.stat().st_size > size + 200)
        assert relay_pid() != relay
        await child.tree.end(KILL_AT_ONCE)
        child.reap()


async def test_a_relay_that_ends_at_once_every_time_is_an_error_of_the_site(tmp_path, monkeypatch):
    async def lose_the_relay():
        async with open_log_relay(tmp_path, run_id="r", env=dict(os.environ), post=ignore):
            monkeypatch.setattr(logs_module, "RELAY", ("/bin/sh", "-c", "sleep 0.1"))
            os.kill(await relay_pid_in(tmp_path), signal.SIGKILL)
            await anyio.sleep(10)

    with pytest.raises(SiteError, match=r"5 times in a row.*log-relay\.log says why"):
        await lose_the_relay()


async def test_an_error_in_the_block_leaves_it_as_it_was_raised(tmp_path):
    with pytest.raises(ValueError, match="a bug of the caller"):
        async with open_log_relay(tmp_path, run_id="r", env=dict(os.environ), post=ignore):
            raise ValueError("a bug of the caller")


async def test_a_relay_that_cannot_be_replaced_is_an_error_of_the_site(tmp_path, monkeypatch):
    async def lose_the_relay():
        async with open_log_relay(tmp_path, run_id="r", env=dict(os.environ), post=ignore):
            monkeypatch.setattr(logs_module, "RELAY", ("/no/program",))
            os.kill(await relay_pid_in(tmp_path), signal.SIGKILL)
            await anyio.sleep(10)

    with pytest.raises(SiteError, match="the log relay does not start"):
        await lose_the_relay()


async def ignore(_event):
    """A listener that does not care."""


async def relay_pid_in(run_dir):
    # For a moment after its start a process has no command line.
    (pid,) = await until(lambda: relays_of(run_dir))
    return pid
