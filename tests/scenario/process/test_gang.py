import os
import signal
from pathlib import Path

import anyio
import msgspec
import pytest

from gangs import gang_in, of, ready, trained
from libra.errors import PeerError
from libra.ids import ChildId, Rank
from libra.wire.framing import encode_frame
from libra.wire.rank import Hello, MiniBatch, Sample, TrainStep
from libra_supervisor.events import (
    ChildExited,
    ChildStarted,
    ChildSuspected,
    GangGaveUp,
    GangLost,
    GangReady,
)
from libra_supervisor.process.log_reader import LogQuery, read_lines
from libra_supervisor.process.peer import connect
from libra_supervisor.process.streams import Stream
from libra_supervisor.ranks.torchrun import TRAINER_ID
from processes import CHILDREN, alive, processes_tagged, site, until

pytestmark = pytest.mark.anyio


STEP = TrainStep(1, ())


async def logged(run_dir, text):
    """Wait for the log relay, a process of its own, to have written `text`."""
    log = run_dir / "logs" / "trainer.log"
    await until(lambda: log.exists() and text in log.read_text())


async def test_all_ranks_are_ready_then_work_then_leave_on_shutdown(tmp_path):
    async with site(tmp_path) as place:
        async with gang_in(place, tmp_path, restores=[Path("/ckpt/step_000004")]) as gang:
            await ready(place)
            assert sorted(gang.members) == [0, 1]
            await gang.broadcast(STEP)
            await until(lambda: trained(place, 1) == [0, 1])
            gang.stop()
        await logged(tmp_path, "rank 0 leaves")
        await logged(tmp_path, "rank 1 leaves")
        await logged(tmp_path, f"'--run-dir', '{tmp_path}', '--restore', '/ckpt/step_000004'")
        (exited,) = of(place, ChildExited)
        assert exited.exit_code == 0
        assert exited.asked_for
        assert of(place, GangLost) == []
        assert not (tmp_path / "ranks.sock").exists()


@pytest.mark.case("R-B69")
@pytest.mark.parametrize(
    ("does", "says"),
    [("exit", "rank 1 exited with code 3"), ("kill", "rank 1 was killed by signal 9")],
)
async def test_one_rank_dies_and_all_start_again_on_one_budget(tmp_path, does, says):
    misbehaves = {"rank": 1, "attempts": [1], "does": does}
    async with site(tmp_path) as place:
        async with gang_in(place, tmp_path, misbehaves=misbehaves) as gang:
            await ready(place)
            await gang.broadcast(STEP)
            await ready(place, 2)
            assert [event.reason for event in of(place, GangLost)] == [says]
            await gang.broadcast(STEP)
            await until(lambda: trained(place, 2) == [0, 1])
            gang.stop()
        assert gang.status().num_failures == 1
        assert [event.attempt for event in of(place, GangReady)] == [1, 2]


@pytest.mark.case("R-B65")
@pytest.mark.parametrize("advances", [True, False])
async def test_only_steps_that_were_not_trained_before_clear_the_row_of_failures(
    tmp_path, advances
):
    misbehaves = {"rank": 1, "attempts": [1, 2, 3, 4], "does": "exit", "after": 1}
    async with site(tmp_path) as place:
        async with gang_in(
            place,
            tmp_path,
            misbehaves=misbehaves,
            restart_max_without_progress=2,
            restart_max_in_window=100,
        ) as gang:
            for attempt in (1, 2, 3, 4) if advances else (1, 2, 3):
                step = TrainStep(attempt if advances else 1, ())
                await ready(place, attempt)
                await gang.broadcast(step)
                await until(lambda attempt=attempt: trained(place, attempt) == [0, 1])
                await gang.broadcast(step)
            if advances:
                await ready(place, 5)
                gang.stop()
            else:
                await until(lambda: of(place, GangGaveUp))
        assert gang.status().num_failures == (4 if advances else 3)
        assert bool(of(place, GangGaveUp)) is not advances


async def test_ranks_that_ignore_sigterm_do_not_outlive_their_gang(tmp_path):
    misbehaves = {"rank": 1, "attempts": [1], "does": "exit", "ignores_sigterm": True}
    async with site(tmp_path) as place:
        async with gang_in(place, tmp_path, misbehaves=misbehaves) as gang:
            await ready(place)
            first = [hello.pid for hello in gang.members.values()]
            environ = Path(f"/proc/{gang.status().pid}/environ").read_bytes()
            told = b"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1"
            assert told in environ.split(b"\0"), "less than the gang's own grace of 2 s"
            await gang.broadcast(STEP)
            await ready(place, 2)
            assert alive(first) == []
            gang.stop()
        assert len(processes_tagged(place.run_id)) == 1, "only the log relay is left"


async def test_all_that_a_rank_prints_is_known_as_its_own(tmp_path):
    program = (str(CHILDREN / "printing_rank.py"),)
    async with site(tmp_path) as place:
        async with gang_in(place, tmp_path, program=program) as gang:
            await ready(place)
            await logged(tmp_path, "and the rest")
            await gang.broadcast(STEP)
            await ready(place, 2)
            gang.stop()
        exited = of(place, ChildExited)[0]
    query = LogQuery(directory=tmp_path / "logs", child_ids=(ChildId("trainer"),))
    lines, aborted = list(read_lines(query)), 0
    for rank in (0, 1):
        own = [line for line in lines if line.rank == rank]
        out = [line.text for line in own if line.stream is Stream.OUT]
        assert out[:201] == [*(f"C says {k}" for k in range(200)), "Python says"]
        err = [line.text for line in own if line.stream is Stream.ERR]
        assert err[0] == "half a line, and the rest"
        aborted += "Fatal Python error: Aborted" in err
    assert aborted >= 1, "torchrun may end the other before it does"
    dumps = [line for line in exited.last_lines if "(most recent call first)" in line]
    assert dumps, exited.last_lines
    assert all(line.startswith("[rank ") for line in dumps)
    assert any("Root Cause" in line for line in exited.last_lines), "and what torchrun says"


async def test_a_rank_that_hangs_is_found_by_its_silence_dumped_and_replaced(tmp_path):
    misbehaves = {"rank": 1, "attempts": [1], "does": "hang"}
    async with site(tmp_path) as place:
        async with gang_in(
            place, tmp_path, misbehaves=misbehaves, rank_heartbeat_timeout_s=1.5
        ) as gang:
            await ready(place)
            await anyio.sleep(2.0)
            assert of(place, ChildSuspected) == [], "ranks without work may be silent"
            await gang.broadcast(STEP)
            await ready(place, 2)
            gang.stop()
        (suspected,) = of(place, ChildSuspected)
        assert suspected.reason.startswith("1 of 2 ranks hang: rank 1 was last heard")
        assert suspected.reason.endswith("in forward of step 1")
        assert of(place, GangLost)[0].reason.startswith("1 of 2 ranks hang: rank 1")
        await logged(tmp_path, "misbehave_here")  # in the stack of the hanging rank


@pytest.mark.parametrize(("exit_code", "num_starts"), [(6, 1), (4, 4)])
async def test_an_error_that_a_restart_cannot_cure_ends_the_run_with_its_code(
    tmp_path, exit_code, num_starts
):
    misbehaves = {"rank": 0, "attempts": [1, 2, 3, 4], "does": "fail", "exit_code": exit_code}
    async with site(tmp_path) as place:
        async with gang_in(place, tmp_path, misbehaves=misbehaves) as gang:
            for attempt in range(1, num_starts + 1):
                await ready(place, attempt)
                await gang.broadcast(STEP)
        (gave_up,) = of(place, GangGaveUp)
        assert gave_up.exit_code == exit_code
        said = f"the trainer failed {num_starts} times and was given up"
        assert gave_up.reason.startswith(said)
        first, *last_lines = gave_up.reason.split("\n")
        assert first.endswith("first cause: rank 0 failed: loss is not finite")
        assert any("Root Cause" in line for line in last_lines), "and what was printed last"
        assert len(of(place, ChildStarted)) == num_starts


async def test_a_gang_that_is_never_restarted_says_what_ended_it_and_no_more(tmp_path):
    misbehaves = {"rank": 0, "attempts": [1], "does": "fail", "exit_code": 4}
    async with site(tmp_path) as place:
        async with gang_in(place, tmp_path, misbehaves=misbehaves, is_restarted=False) as gang:
            await ready(place, 1)
            await gang.broadcast(STEP)
        (gave_up,) = of(place, GangGaveUp)
        assert gave_up.reason == "rank 0 failed: loss is not finite"
        assert len(of(place, ChildStarted)) == 1


async def test_a_rank_that_lives_on_without_its_socket_takes_the_gang_down(tmp_path):
    misbehaves = {"rank": 1, "attempts": [1], "does": "close"}
    async with site(tmp_path) as place:
        async with gang_in(place, tmp_path, misbehaves=misbehaves) as gang:
            await ready(place)
            await gang.broadcast(STEP)
            await ready(place, 2)
            gang.stop()
        assert of(place, ChildSuspected)[0].reason == "rank 1 closed its control socket"


async def test_a_rank_that_does_not_read_holds_up_the_sender_only_until_it_is_ended(tmp_path):
    misbehaves = {"rank": 1, "attempts": [1], "does": "deaf"}
    sample = Sample("t", bytes(4_000_000), bytes(1_000_000), bytes(4_000_000), 0.5)
    batch = TrainStep(1, (MiniBatch((sample, sample), 1, 1),))
    async with (
        site(tmp_path) as place,
        gang_in(place, tmp_path, misbehaves=misbehaves, rank_heartbeat_timeout_s=1.5) as gang,
    ):
        await ready(place)
        await gang.broadcast(STEP)
        with pytest.raises(PeerError, match="rank 1"):
            await gang.send(Rank(1), batch)
        await ready(place, 2)
        gang.stop()


async def test_ranks_exit_by_themselves_when_the_supervisor_is_gone(tmp_path):
    async with site(tmp_path) as place, gang_in(place, tmp_path) as gang:
        await ready(place)
        pids = [hello.pid for hello in gang.members.values()]
        for link in gang._hooks.roster._links.values():
            link.close()
        await until(lambda: alive(pids) == [])
        gang.stop()


async def test_a_run_directory_too_deep_for_a_socket_address_works(tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    async with site(deep) as place, gang_in(place, deep) as gang:
        await ready(place)
        await gang.broadcast(STEP)
        await until(lambda: trained(place, 1) == [0, 1])
        gang.stop()


async def test_a_stranger_that_claims_to_be_a_rank_is_turned_away(tmp_path):
    async with site(tmp_path) as place, gang_in(place, tmp_path) as gang:
        await ready(place)
        for run_id, attempt, rank in (("other", 1, 0), (place.run_id, 7, 0), (place.run_id, 1, 0)):
            with connect(tmp_path / "ranks.sock") as connection:
                hello = Hello(run_id, attempt, rank, 2, 0, 0, 0, 0, 0, 0, os.getpid(), 1)
                connection.sendall(encode_frame(msgspec.msgpack.encode(hello)))
                await anyio.wait_readable(connection)
                assert connection.recv(10) == b""
        await gang.broadcast(STEP)
        await until(lambda: trained(place, 1) == [0, 1])
        gang.stop()


async def test_torchrun_killed_by_others_leaves_no_rank(tmp_path):
    async with site(tmp_path) as place, gang_in(place, tmp_path) as gang:
        await ready(place)
        pids = [hello.pid for hello in gang.members.values()]
        os.kill(of(place, ChildStarted)[0].pid, signal.SIGKILL)
        await ready(place, 2)
        assert alive(pids) == []
        gang.stop()


async def test_an_error_of_those_who_listen_leaves_the_gang_as_it_was_raised(tmp_path):
    async with site(tmp_path) as place:

        async def fail(event):
            if isinstance(event, GangReady):
                raise OSError("the journal is broken")

        place.post = fail
        with pytest.raises(ExceptionGroup) as raised:
            async with gang_in(place, tmp_path):
                await anyio.sleep(20)
        # The group is that of the test's own tasks.
        assert [str(error) for error in raised.value.exceptions] == ["the journal is broken"]
        left = await place.spawner.clear(TRAINER_ID, 1.0)
        assert left.num_killed == 0
