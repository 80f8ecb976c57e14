"""Ranks that exchange their load through a real directory, and through one that misbehaves."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from fleets import FIRST, fleet_of, place, scheduling
from libra import clock
from libra.errors import SiteError
from libra.ids import InstanceId
from libra.scheduling.load import OwnLoad
from libra.scheduling.shared_view import FORMAT, RankLoad
from libra_supervisor.shared_load.directory import SharedDirectory
from libra_supervisor.shared_load.exchange import (
    DISK_TIMEOUT_S,
    MAX_DISK_SHARE,
    MAX_LOOP_SHARE,
    MIN_INTERVAL_S,
    LoadExchange,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


def rank_in(path, rank, *, num_instances=4, **options):
    scheduler = fleet_of(num_instances, now=clock.now())
    config = scheduling(shared_load_dir=str(path), **options)
    files = SharedDirectory(Path(path), rank=rank, writer=f"writer-{rank}")
    exchange = LoadExchange(scheduler, files, config, rank=rank, writer=f"writer-{rank}")
    return scheduler, exchange


@asynccontextmanager
async def running(*exchanges):
    async with anyio.create_task_group() as tg:
        for exchange in exchanges:
            tg.start_soon(exchange.run)
        yield
        tg.cancel_scope.cancel()


async def eventually(is_true, within_s=10.0):
    with anyio.fail_after(within_s):
        while not is_true():
            await clock.sleep(0.01)


async def test_ranks_place_their_requests_by_the_sum_of_all(tmp_path):
    first, first_exchange = rank_in(tmp_path, "0")
    second, second_exchange = rank_in(tmp_path, "1")
    for _ in range(8):
        place(first, clock.now())
    taken = [place(first, clock.now()).instance_id for _ in range(2)]
    await first_exchange.exchange_once()
    await second_exchange.exchange_once()
    seen = Counter(place(second, clock.now()).instance_id for _ in range(2))
    assert set(seen).isdisjoint(taken)
    assert second_exchange.status().live_ranks == ("0",)


async def test_an_own_write_is_followed_by_a_read_at_once(tmp_path):
    first, first_exchange = rank_in(tmp_path, "0", shared_load_cache_ttl_s=1000)
    second, second_exchange = rank_in(tmp_path, "1", shared_load_cache_ttl_s=1000)
    await first_exchange.exchange_once()
    held = place(second, clock.now())
    await second_exchange.exchange_once()
    await first_exchange.exchange_once()
    assert all(view.remote_requests == 0 for view in first.instances(clock.now()))
    place(first, clock.now())
    await first_exchange.exchange_once()
    loads = {v.instance_id: v.remote_requests for v in first.instances(clock.now())}
    assert loads[held.instance_id] == 1


async def test_a_rank_that_leaves_takes_its_load_with_it(tmp_path):
    first, first_exchange = rank_in(tmp_path, "0")
    second, second_exchange = rank_in(tmp_path, "1", shared_load_ttl_s=0.3)
    place(first, clock.now())
    async with running(second_exchange):
        async with running(first_exchange):
            await eventually(
                lambda: any(view.remote_requests for view in second.instances(clock.now()))
            )
            assert second_exchange.status().live_ranks == ("0",)
        assert list(tmp_path.glob("load_0*")) == []
        await eventually(
            lambda: all(view.remote_requests == 0 for view in second.instances(clock.now()))
        )
        assert second_exchange.status().live_ranks == ()
    assert list(tmp_path.iterdir()) == []


async def test_short_foreign_and_vanishing_files_are_passed_over(tmp_path):
    scheduler, exchange = rank_in(tmp_path, "0")
    good = RankLoad(
        format=FORMAT,
        rank="1",
        writer="w",
        sequence=1,
        written_at_ns=0,
        load=(OwnLoad(InstanceId("i1"), FIRST, 2, 20),),
    )
    whole = msgspec.json.encode(good)
    (tmp_path / "load_1.json").write_bytes(whole)
    (tmp_path / "load_2.json").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "load_3.json").write_bytes(whole)  # says that it is rank 1
    (tmp_path / "load_4.json").symlink_to(tmp_path / "gone")
    (tmp_path / "load_5.json").mkdir()
    newer = whole.replace(b'"format":1', b'"format":9').replace(b'"rank":"1"', b'"rank":"6"')
    (tmp_path / "load_6.json").write_bytes(newer)
    huge = whole.replace(b'"num_requests":2', b'"num_requests":' + b"9" * 400)
    (tmp_path / "load_7.json").write_bytes(huge.replace(b'"rank":"1"', b'"rank":"7"'))
    (tmp_path / "load_8.json").write_bytes(b'{"other":' + b"[" * 100_000)
    (tmp_path / "notes.txt").write_text("not ours")
    await exchange.exchange_once()
    assert exchange.status().live_ranks == ("1",)
    assert sum(view.remote_requests for view in scheduler.instances(clock.now())) == 2


class StuckFiles:
    """A directory on a server that stopped answering."""

    def __init__(self):
        self.release = threading.Event()
        self.num_calls = 0

    def _hang(self):
        self.num_calls += 1
        self.release.wait(30)

    def write(self, content):
        self._hang()

    def read(self):
        self._hang()
        return {}

    def remove(self):
        pass


async def test_a_disk_that_hangs_never_holds_up_requests(monkeypatch):
    monkeypatch.setattr("libra_supervisor.shared_load.exchange.DISK_TIMEOUT_S", 0.2)
    assert DISK_TIMEOUT_S == 5.0
    scheduler = fleet_of(2, now=clock.now())
    files = StuckFiles()
    exchange = LoadExchange(scheduler, files, scheduling(), rank="0", writer="w")
    try:
        async with running(exchange):
            for _ in range(20):
                began = clock.now()
                place(scheduler, began)
                await clock.sleep(0.02)
                assert clock.now() - began < 1.0
            await eventually(lambda: not exchange.status().is_disk_answering)
            await clock.sleep(1.0)
            assert files.num_calls <= 2
    finally:
        files.release.set()


def test_a_directory_that_cannot_be_made_is_named():
    with pytest.raises(SiteError, match="shared_load_dir /proc/nothing cannot be written"):
        SharedDirectory(Path("/proc/nothing"), rank="0", writer="w")


async def test_a_second_process_with_the_same_rank_is_reported(tmp_path, capsys):
    _, exchange = rank_in(tmp_path, "0", shared_load_cache_ttl_s=0)
    await exchange.exchange_once()
    other = RankLoad(format=FORMAT, rank="0", writer="other", sequence=1, written_at_ns=0, load=())
    SharedDirectory(tmp_path, rank="0", writer="other").write(other)
    await exchange.exchange_once()
    assert "two processes have one rank" in capsys.readouterr().out


WRITER = """
import sys, time
from pathlib import Path
sys.path[:0] = ["tests/support", "supervisor", "."]
from fleets import FIRST
from libra.ids import InstanceId
from libra.scheduling.load import OwnLoad
from libra.scheduling.shared_view import FORMAT, RankLoad
from libra_supervisor.shared_load.directory import SharedDirectory
rank = sys.argv[2]
files = SharedDirectory(Path(sys.argv[1]), rank=rank, writer="process-" + rank)
for sequence in range(1, 200):
    # Both numbers always agree in what was written; a torn read would show one without the other.
    load = tuple(OwnLoad(InstanceId(f"i{k}"), FIRST, sequence, 7 * sequence) for k in range(64))
    files.write(RankLoad(format=FORMAT, rank=rank, writer="process-" + rank, sequence=sequence,
                         written_at_ns=0, load=load))
"""


@pytest.mark.timeout(90)
def test_readers_see_whole_files_while_other_processes_replace_them(tmp_path):
    argv = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*argv, rank]) for rank in ("1", "2")]  # noqa: S603
    reader = SharedDirectory(tmp_path, rank="0", writer="reader")
    seen = Counter()
    try:
        while any(w.poll() is None for w in writers):
            found = reader.read()
            assert found.keys() >= seen.keys()  # at no moment is a file short or missing
            for rank, content in found.items():
                seen[rank] += 1
                assert {(e.num_requests, e.num_tokens) for e in content.load} == {
                    (content.sequence, 7 * content.sequence)
                }
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert min(seen["1"], seen["2"]) > 0
    assert [w.returncode for w in writers] == [0, 0]


def bind_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, bind_socket, lambda path: path.symlink_to("/dev/zero")]
)
def test_what_is_no_regular_file_is_left_out_and_keeps_nobody_waiting(tmp_path, make):
    files = SharedDirectory(tmp_path, rank="0", writer="w")
    content = RankLoad(format=FORMAT, rank="0", writer="w", sequence=1, written_at_ns=0, load=())
    files.write(content)
    make(tmp_path / "load_1.json")
    assert files.read() == {"0": content}


def test_a_fifo_is_no_file_even_when_something_comes_out_of_it(tmp_path):
    files = SharedDirectory(tmp_path, rank="0", writer="w")
    content = RankLoad(format=FORMAT, rank="1", writer="w", sequence=1, written_at_ns=0, load=())
    path = tmp_path / "load_1.json"
    os.mkfifo(path)
    both_ends = os.open(path, os.O_RDWR)
    try:
        os.write(both_ends, msgspec.json.encode(content))
        assert files.read() == {}
    finally:
        os.close(both_ends)


class Rank:
    """A rank in a process of its own."""

    def __init__(self, directory, name, *, num_instances, num_requests):
        script = Path(__file__).parents[2] / "support/children/load_rank.py"
        argv = [sys.executable, str(script), str(directory), name, str(num_instances)]
        self.process = subprocess.Popen(  # noqa: S603
            [*argv, str(num_requests)], stdout=subprocess.PIPE, text=True
        )

    def until(self, is_true):
        """The first report for which `is_true` holds."""
        for line in self.process.stdout:
            report = json.loads(line)
            if is_true(report):
                return report
        raise AssertionError("the rank ended")

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.mark.timeout(120)
def test_processes_that_share_a_fleet_see_each_other_and_forget_one_that_was_killed(tmp_path):
    ranks, total = [], Counter()
    try:
        for name in ("0", "1", "2"):
            rank = Rank(tmp_path, name, num_instances=8, num_requests=5)
            ranks.append(rank)
            total.update(rank.until(lambda report: sum(report["own"].values()) == 5)["own"])
            # Its load lies in the directory before the next one places anything.
            rank.until(lambda _report: num_written(tmp_path) == 5 * len(ranks))
        # 15 requests on 8 instances; ranks that see only themselves would have put 3 on five.
        assert max(total.values()) == 2
        for rank in ranks:
            rank.until(lambda report: sum(report["remote"].values()) == 10)
        ranks[2].kill()
        for rank in ranks[:2]:
            rank.until(lambda report: sum(report["remote"].values()) == 5)
        assert (tmp_path / "load_2.json").exists()
    finally:
        for rank in ranks:
            rank.kill()


def num_written(directory):
    files = SharedDirectory(directory, rank="reader", writer="reader").read()
    return sum(entry.num_requests for content in files.values() for entry in content.load)


class FailingFiles:
    """A directory that answers with errors until it is mended."""

    def __init__(self):
        self.is_broken = True

    def write(self, content):
        if self.is_broken:
            raise OSError(28, "No space left on device")

    def read(self):
        if self.is_broken:
            raise OSError(116, "Stale file handle")
        return {}

    def remove(self):
        pass


async def test_a_disk_that_fails_is_said_once_and_so_is_its_return(capsys):
    scheduler, files = fleet_of(1, now=clock.now()), FailingFiles()
    exchange = LoadExchange(scheduler, files, scheduling(), rank="0", writer="w")
    for _ in range(5):
        place(scheduler, clock.now())
        await exchange.exchange_once()
    files.is_broken = False
    place(scheduler, clock.now())
    await exchange.exchange_once()
    said = capsys.readouterr().out
    assert said.count("shared_load_dir fails") == 1
    assert said.count("answers again") == 1
    assert exchange.status().is_disk_answering


class SlowFiles:
    def write(self, content):
        time.sleep(0.1)

    def read(self):
        time.sleep(0.1)
        return {}

    def remove(self):
        pass


async def test_dear_exchanges_come_less_often():
    scheduler = fleet_of(1, now=clock.now())
    exchange = LoadExchange(scheduler, SlowFiles(), scheduling(), rank="0", writer="w")
    assert exchange._interval_s() == MIN_INTERVAL_S
    await exchange.exchange_once()
    assert exchange._interval_s() >= 0.2 / MAX_DISK_SHARE
    exchange._loop_s = 0.1  # of a large fleet
    assert exchange._interval_s() >= 0.1 / MAX_LOOP_SHARE
