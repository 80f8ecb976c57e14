import os

import anyio
import pytest
import trio.testing

from fake_kernel import FakeKernel
from libra import clock
from libra.ids import ChildId, RunId
from libra_supervisor.process.identity import ProcessIdentity
from libra_supervisor.process.tree import StopDeadlines, Tree

pytestmark = pytest.mark.anyio
TAG = ("run", "vllm-0")
LEADER = ProcessIdentity(500_000, 100, "boot")


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture
def kernel():
    it = FakeKernel()
    it.add(LEADER.pid, tag=TAG)
    return it


def tree_in(kernel):
    return Tree(LEADER, run_id=RunId("run"), child_id=ChildId("vllm-0"), kernel=kernel)


@pytest.mark.case("R-B48")
async def test_what_outlives_sigkill_is_named_and_the_wait_for_it_is_bounded(kernel):
    kernel.add(500_001, ppid=LEADER.pid, state="D")
    kernel.unkillable.add(500_001)
    began_at = anyio.current_time()
    ended = await tree_in(kernel).end(StopDeadlines(term_grace_s=20, kill_wait_s=10))
    assert [row.pid for row in ended.survivors] == [500_001]
    assert ended.detail == "pid 500001 in state D"
    assert 10 <= anyio.current_time() - began_at < 10.5


@pytest.mark.case("R-B56", "R-B97")
async def test_a_deaf_leader_gets_one_sigterm_then_sigkill_at_the_end_of_the_grace(kernel):
    kernel.ignores_term.add(LEADER.pid)
    began_at = anyio.current_time()
    ended = await tree_in(kernel).end(StopDeadlines(term_grace_s=20, kill_wait_s=10))
    names = [name for pid, name in kernel.signals if pid == LEADER.pid]
    assert names == ["SIGTERM", "SIGCONT", "SIGKILL"]
    assert not ended.ended_in_grace
    assert 20 <= anyio.current_time() - began_at < 20.5


@pytest.mark.case("R-B56")
async def test_whoever_ends_a_tree_that_is_being_ended_asks_its_leader_nothing_more(kernel):
    kernel.ignores_term.add(LEADER.pid)
    tree = tree_in(kernel)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tree.end, StopDeadlines(term_grace_s=20, kill_wait_s=10))
        await clock.sleep(5)
        began_at = anyio.current_time()
        await tree.end(StopDeadlines(term_grace_s=2, kill_wait_s=10))
        assert 2 <= anyio.current_time() - began_at < 2.5, "the shorter grace holds"
    names = [name for pid, name in kernel.signals if pid == LEADER.pid]
    assert names.count("SIGTERM") == 1
    assert names.count("SIGKILL") == 1


async def test_a_process_that_is_started_during_the_kill_is_found_by_the_next_sweep(kernel):
    kernel.respawns = {LEADER.pid: 500_002, 500_002: 500_003}
    ended = await tree_in(kernel).end(StopDeadlines(term_grace_s=0, kill_wait_s=10))
    assert ended.num_killed == 3
    assert kernel.rows == {}


async def test_a_process_that_forks_for_ever_ends_the_wait_all_the_same(kernel):
    kernel.survey_s = 0.01
    kernel.respawns = {pid: pid + 1 for pid in range(500_000, 600_000)}
    ended = await tree_in(kernel).end(StopDeadlines(term_grace_s=0, kill_wait_s=3))
    assert len(ended.survivors) == 1


@pytest.mark.case("R-B73")
async def test_a_stranger_on_the_leaders_old_pid_is_left_alone(kernel):
    tree = tree_in(kernel)
    kernel.end(LEADER.pid)
    kernel.add(LEADER.pid, ppid=1, start_ticks=900, tag=("other", "child"))
    kernel.add(500_004, ppid=LEADER.pid, sid=LEADER.pid, start_ticks=901)
    ended = await tree.end(StopDeadlines(term_grace_s=5, kill_wait_s=5))
    assert ended.num_killed == 0
    assert set(kernel.rows) == {LEADER.pid, 500_004}


async def test_self_and_ancestors_are_spared_even_when_they_carry_the_tag(kernel):
    kernel.add(os.getpid(), ppid=os.getppid(), tag=TAG)
    kernel.add(os.getppid(), ppid=1, tag=TAG)
    await tree_in(kernel).end(StopDeadlines(term_grace_s=0, kill_wait_s=5))
    assert set(kernel.rows) == {os.getpid(), os.getppid()}


@pytest.mark.parametrize(
    "hidden",
    [
        {"ppid": 1, "sid": 7, "tag": TAG},
        {"ppid": LEADER.pid, "sid": 7},
        {"ppid": 1, "sid": LEADER.pid},
    ],
    ids=["tag", "descent", "session"],
)
async def test_one_mark_is_enough_to_be_found(kernel, hidden):
    kernel.add(500_005, **hidden)
    await tree_in(kernel).end(StopDeadlines(term_grace_s=0, kill_wait_s=5))
    assert kernel.rows == {}


async def test_a_tag_of_another_child_or_run_is_no_mark(kernel):
    kernel.add(500_006, ppid=1, sid=7, tag=("run", "vllm-1"))
    kernel.add(500_007, ppid=1, sid=7, tag=("other", "vllm-0"))
    await tree_in(kernel).end(StopDeadlines(term_grace_s=0, kill_wait_s=5))
    assert set(kernel.rows) == {500_006, 500_007}


async def test_a_zombie_is_no_survivor(kernel):
    kernel.add(500_008, ppid=LEADER.pid, state="Z")
    kernel.unkillable.add(500_008)
    ended = await tree_in(kernel).end(StopDeadlines(term_grace_s=0, kill_wait_s=5))
    assert ended.survivors == ()


async def test_segments_seen_at_any_time_are_handed_to_the_sweep(kernel):
    kernel.segments = {LEADER.pid: {"psm_a"}}
    tree = tree_in(kernel)
    await tree.observe()
    kernel.segments = {LEADER.pid: {"psm_b"}}
    ended = await tree.end(StopDeadlines(term_grace_s=0, kill_wait_s=5))
    assert ended.removed_segments == ("psm_a", "psm_b")
