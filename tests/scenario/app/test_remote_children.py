"""Real children of a follower, supervised by a leader over a link that is cut and healed."""

import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

import anyio
import pytest

from fake_runs import SUPPORT
from gangs import config, of, ready, trained
from libra import clock
from libra.errors import ChildError, PeerError, SiteError
from libra.ids import ChildId, Incarnation, Rank
from libra.planner.plan import TrainPlacement
from libra.storage import arrival
from libra.storage.receipt import holds
from libra.wire.node import Leave
from libra.wire.rank import MiniBatch, Sample, TrainStep
from libra_supervisor.app.device_gate import DeviceGate, NodeGate, all_of
from libra_supervisor.events import (
    ChildExited,
    ChildReady,
    ChildStarted,
    ChildWaiting,
    GangGaveUp,
    GangLost,
)
from libra_supervisor.instances.port_lease import lease_port
from libra_supervisor.nodes.members import NodeLost
from libra_supervisor.nodes.remote import remote_port
from libra_supervisor.nodes.remote_child import RemoteSpawner
from libra_supervisor.process.identity import ProcessIdentity
from libra_supervisor.process.kernel import read_tag
from libra_supervisor.process.lifecycle import Adoptee, ChildHooks, ChildState, Deadlines
from libra_supervisor.process.logs import RELAY_ID
from libra_supervisor.process.restart import RestartBudget, RestartPolicy
from libra_supervisor.process.supervise import Supervision
from libra_supervisor.process.tree import StopDeadlines
from libra_supervisor.ranks.agents import AgentsSpawner
from libra_supervisor.ranks.gang import Gang
from libra_supervisor.ranks.torchrun import TRAINER_ID, AgentSite, GangSite
from libra_supervisor.run_directory import RunDirectory
from processes import CHILDREN, alive, processes_tagged, python, site, until
from two_nodes import TERMS, two_nodes
from weight_dirs import publish_weights

pytestmark = pytest.mark.anyio
SHORT = Deadlines(
    start_timeout_s=5,
    drain_timeout_s=1,
    stop=StopDeadlines(term_grace_s=1, kill_wait_s=5, hurried_grace_s=0.1),
)


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


def running(place):
    """Pids of children, the relay of their logs aside."""
    tags = {pid: read_tag(pid) for pid in processes_tagged(place.run_id)}
    return [pid for pid, tag in tags.items() if tag is not None and tag[1] != RELAY_ID]


class Hooks(ChildHooks):
    def __init__(self, place, nodes, *argv, **changes):
        self.place, self.nodes, self.argv, self.changes = place, nodes, argv, changes

    async def spec(self, incarnation):
        return self.place.spec(*self.argv, **self.changes)

    async def hindrance(self):
        return await self.nodes.node.hindrance()


@asynccontextmanager
async def supervised(place, nodes, *argv, adopt=None, ends=True, **changes):
    supervision = Supervision(
        ChildId("child"),
        Hooks(place, nodes, *argv, **changes),
        spawner=RemoteSpawner(nodes.node),
        budget=RestartBudget(RestartPolicy(backoff_initial_s=0.01, backoff_max_s=0.05)),
        deadlines=SHORT,
        post=place.post,
        rng=Random(4),
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervision.run, adopt)
        yield supervision
        if ends:
            supervision.stop()
            with anyio.fail_after(20):
                await supervision.until_down()
        tasks.cancel_scope.cancel()


async def started(place, num=1):
    await until(lambda: len(of(place, ChildReady)) >= num, within_s=20)
    return [event.pid for event in of(place, ChildStarted)]


async def test_a_child_there_is_started_watched_restarted_and_ended_with_its_tree(tmp_path):
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        async with supervised(place, nodes, *python("tree.py", "2", "2")):
            (first,) = await started(place)
            os.kill(first, signal.SIGKILL)
            _, second = await started(place, 2)
            assert of(place, ChildExited)[0].signal == signal.SIGKILL
            assert not of(place, ChildExited)[0].asked_for
            await until(lambda: len(running(place)) >= 7)
        assert of(place, ChildExited)[-1].asked_for
        assert not alive([first, second])
        assert not running(place)
        assert nodes.hands.children() == ()


async def test_what_cannot_start_there_says_why_and_last_words_come_over(tmp_path):
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        async with supervised(place, nodes, "/no/such/program") as supervision:
            await until(lambda: supervision.status().num_failures >= 1)
            assert "No such file" in supervision.status().last_error
        script = ("/bin/sh", "-c", "echo last words; exit 3")
        async with supervised(place, nodes, *script):
            await until(lambda: len(of(place, ChildExited)) >= 1)
            exited = of(place, ChildExited)[0]
            assert exited.exit_code == 3
            assert exited.last_lines[-1].endswith("last words")


async def test_slots_are_looked_up_among_the_devices_there(tmp_path):
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        spawner = RemoteSpawner(nodes.node)

        def spec(slots):
            env = {"CUDA_VISIBLE_DEVICES": slots}
            return place.spec("/bin/sh", "-c", "echo has $CUDA_VISIBLE_DEVICES.", env=env)

        for slots, devices in (("1", "GPU-b"), ("0,1", "GPU-a,GPU-b"), ("", "")):
            child = await spawner.spawn(spec(slots), Incarnation(f"child-{slots}"))
            await child.wait()
            assert (await child.last_lines(1))[0].endswith(f"has {devices}.")
            child.reap()
        with pytest.raises(ChildError, match="slots 2 are wanted here, and 2 devices are"):
            await spawner.spawn(spec("2"), Incarnation("child-2"))


async def test_a_hurried_stop_hurries_there_too(tmp_path):
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        async with supervised(place, nodes, *python("tree.py", "1", "1", "ignore")) as supervision:
            await started(place)
            await until(lambda: len(running(place)) >= 2)
            supervision.stop()
            supervision.stop()
        assert not running(place)


@pytest.mark.case("R-B74")
async def test_a_cut_off_node_s_children_are_lost_and_never_run_twice(tmp_path):
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        script = python("tree.py", "0", "0")
        async with supervised(place, nodes, *script) as supervision:
            (first,) = await started(place)
            nodes.net.cut()
            await until(lambda: of(place, ChildExited), within_s=20)
            exited = of(place, ChildExited)[0]
            assert exited.reason.startswith("node 1 was lost")
            # A server waits for a leader; nothing is started while it may.
            assert alive([first])
            await until(lambda: of(place, ChildWaiting))
            assert "node 1 is away" in of(place, ChildWaiting)[0].reason
            assert len(of(place, ChildStarted)) == 1
            nodes.net.mend()
            _, second = await started(place, 2)
            assert not alive([first])
            assert alive([second])
            # The child did nothing wrong.
            assert supervision.status().num_failures == 0
            assert "node 1 was lost" in supervision.status().last_error
        assert not running(place)


async def test_a_start_that_its_node_did_not_live_to_see_costs_nothing_of_the_budget(tmp_path):
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        spec = place.spec

        def last_words(*argv, **changes):
            nodes.net.is_silent = True
            place.spec = spec
            return spec(*argv, **changes)

        place.spec = last_words
        async with supervised(place, nodes, *python("tree.py", "0", "0")) as supervision:
            await until(lambda: of(place, ChildWaiting), within_s=20)
            assert supervision.status().num_failures == 0
            assert "does not start: node 1" in supervision.status().last_error
            nodes.net.mend()
            await started(place)


async def test_bound_children_end_with_the_lease_before_their_node_counts_as_lost(tmp_path):
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        script = python("tree.py", "1", "1", "ignore", "setsid")
        async with supervised(place, nodes, *script, is_bound_to_supervisor=True):
            await started(place)
            await until(lambda: len(running(place)) >= 2)
            seen = []
            original = nodes.node.on_lost

            def on_lost(reason):
                seen.append(running(place))
                original(reason)

            nodes.node.on_lost = on_lost
            nodes.net.is_silent = True
            await until(lambda: any(isinstance(it, NodeLost) for it in nodes.news), within_s=20)
            assert seen == [[]]
            nodes.net.mend()


async def test_a_leader_that_is_started_again_adopts_what_still_runs_and_ends_the_rest(tmp_path):
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        async with supervised(place, nodes, *python("tree.py", "0", "0"), ends=False):
            (pid,) = await started(place)
            begun = of(place, ChildStarted)[0]
            other = await RemoteSpawner(nodes.node).spawn(
                place.spec(*python("tree.py", "0", "0"), child_id="other"), Incarnation("other-1")
            )
            # The leader dies without a word.
            nodes.keep = (ChildId("child"),)
            nodes.lead(term=2)
        identity = ProcessIdentity(pid, begun.start_ticks, begun.boot_id)
        adopt = Adoptee(identity=identity, incarnation=begun.incarnation)
        assert not nodes.node.is_member
        # It is there before its node is.
        async with supervised(place, nodes, *python("tree.py", "0", "0"), adopt=adopt):
            await until(lambda: of(place, ChildStarted)[-1].is_adopted, within_s=20)
            assert of(place, ChildStarted)[-1].pid == pid
            await until(lambda: not alive([other.identity.pid]), within_s=20)
            assert alive([pid])
        assert not alive([pid])


@pytest.mark.case("R-B73")
@pytest.mark.parametrize("wrong", ["incarnation", "pid", "start_ticks", "boot_id"])
async def test_another_process_than_the_one_written_down_is_not_adopted_but_ended(tmp_path, wrong):
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        async with supervised(place, nodes, *python("tree.py", "0", "0"), ends=False):
            (pid,) = await started(place)
            begun = of(place, ChildStarted)[0]
            nodes.keep = (ChildId("child"),)
            nodes.lead(term=2)
        known = {
            "incarnation": begun.incarnation, "pid": pid,
            "start_ticks": begun.start_ticks, "boot_id": begun.boot_id,
        }  # fmt: skip
        known[wrong] = "another" if isinstance(known[wrong], str) else known[wrong] + 1
        incarnation = Incarnation(known.pop("incarnation"))
        adopt = Adoptee(identity=ProcessIdentity(**known), incarnation=incarnation)
        async with supervised(place, nodes, *python("tree.py", "0", "0"), adopt=adopt):
            await until(lambda: len(of(place, ChildStarted)) == 2, within_s=20)
            assert not of(place, ChildStarted)[-1].is_adopted
            assert not alive([pid])


async def test_a_stop_does_not_wait_for_a_node_whose_servers_might_be_adopted(tmp_path):
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        nodes.net.cut()
        await until(lambda: not nodes.node.is_member, within_s=20)
        identity = ProcessIdentity(os.getpid(), 1, "b")
        adopt = Adoptee(identity=identity, incarnation=Incarnation("child-1"))
        async with supervised(place, nodes, "/bin/true", adopt=adopt) as supervision:
            await until(lambda: supervision.status().state is ChildState.WAITING)
        assert supervision.status().state is ChildState.DOWN
        assert not of(place, ChildStarted)


async def test_ports_that_a_leader_before_had_held_are_free_for_the_next(tmp_path):
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        held = await remote_port(nodes.node, "127.0.0.1", 0)
        nodes.lead(term=2)
        await nodes.until_member()
        again = await remote_port(nodes.node, "127.0.0.1", held.port)
        again.close()


@pytest.mark.case("R-B70")
async def test_ports_are_held_there_until_they_are_freed(tmp_path):
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        held = await remote_port(nodes.node, "127.0.0.1", 0)
        with pytest.raises(SiteError, match="is in use"):
            lease_port("127.0.0.1", held.port)
        with pytest.raises(SiteError, match="is in use"):
            await remote_port(nodes.node, "127.0.0.1", held.port)
        held.close()
        await until(lambda: not nodes.hands._ports)
        lease_port("127.0.0.1", held.port).close()


async def test_a_node_is_told_to_leave(tmp_path):
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        nodes.node.say(Leave(4, "a child failed"))
        await until(lambda: nodes.left == [(4, "a child failed")])


# A gang whose ranks lie on this node and on the follower


def new_folder(path):
    path.mkdir()
    return path


def env_of_ranks(misbehaves):
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p),
        "FAKE_RANK": json.dumps(misbehaves or {}),
    }


@asynccontextmanager
async def spread_gang(place, nodes, *, misbehaves=None, num_here=1, name=TRAINER_ID):
    """A replica's, which is started once, where it is not the trainer's."""
    directory = RunDirectory(place.run_dir)
    directory.create()
    env = env_of_ranks(misbehaves)
    here = (AgentSite(node=0, host="127.0.0.1", num_ranks=1, env=env),) * num_here
    there = AgentSite(node=1, host="127.0.0.1", num_ranks=1, env={"FAKE_RANK": env["FAKE_RANK"]})
    agents = (*here, there)
    gang_site = GangSite(
        run_id=place.run_id,
        directory=directory,
        placement=TrainPlacement(
            tp=1, pp=1, cp=1, ep=1, dp=len(agents), slots=tuple(range(len(agents)))
        ),
        device="cpu",
        env={},
        agents=agents,
        launcher=(sys.executable, str(CHILDREN / "fake_torchrun.py")),
        program=(str(CHILDREN / "fake_rank.py"),),
        child_id=name,
        is_restarted=name == TRAINER_ID,
        socket_directory=new_folder(directory.root / name),
    )

    async def choose(attempt):
        return None

    remote = RemoteSpawner(nodes.node)

    async def hold(node):
        if node:
            return await remote_port(nodes.node, "127.0.0.1", 0)
        return lease_port("127.0.0.1")

    gang = Gang(
        gang_site,
        spawner=AgentsSpawner(lambda node: remote if node else place.spawner, hold),
        config=config(),
        choose=choose,
        post=place.post,
        rng=Random(5),
        hindrance=nodes.node.hindrance,
    )
    async with anyio.create_task_group() as tasks:

        async def welcome(hello, link):
            try:
                await nodes.gangs[hello.gang].welcome(hello, link)
            except PeerError:
                pass
            finally:
                link.close()

        nodes.gangs = getattr(nodes, "gangs", {}) | {name: gang}
        nodes.node.on_rank = lambda linked, link: tasks.start_soon(welcome, linked.hello, link)
        tasks.start_soon(gang.run)
        yield gang
        gang.stop()
        with anyio.fail_after(30):
            await gang.until_down()
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("num_here", [0, 1])
async def test_ranks_of_two_nodes_work_together_and_leave_together(tmp_path, num_here):
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        async with spread_gang(place, nodes, num_here=num_here) as gang:
            await ready(place, within_s=30)
            everybody = list(range(num_here + 1))
            assert sorted(gang.members) == everybody
            sample = Sample("t", b"x" * (5 << 20), b"", b"", 0.0)
            batch = TrainStep(1, (MiniBatch((sample,), 1, 1),))
            await gang.broadcast(batch)
            await until(lambda: trained(place, 1) == everybody, within_s=20)
        (exited,) = [it for it in of(place, ChildExited) if it.child_id == "trainer"]
        assert exited.asked_for
        assert not running(place)
    log = (tmp_path / "logs" / "trainer-1.log").read_text()
    assert f"rank {num_here} leaves" in log


async def test_ranks_that_end_because_a_node_is_lost_cost_nothing_of_the_budget(tmp_path):
    async with (
        site(tmp_path) as place,
        two_nodes(place) as nodes,
        spread_gang(place, nodes) as gang,
    ):
        await ready(place, within_s=30)
        nodes.net.is_silent = True
        # The rank here notices long before the lease is over.
        os.kill(gang.members[Rank(0)].pid, signal.SIGKILL)
        await until(lambda: of(place, GangLost), within_s=30)
        reason = of(place, GangLost)[0].reason
        assert "node 1 was lost" in reason
        assert "rank 0 was killed by signal 9" in reason
        assert gang.status().num_failures == 0
        nodes.net.mend()
        await ready(place, 2, within_s=30)


@pytest.mark.case("R-B69")
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_dies_on_either_node_takes_all_down_on_one_budget(tmp_path, rank):
    misbehaves = {"rank": rank, "attempts": [1], "does": "kill"}
    async with (
        site(tmp_path) as place,
        two_nodes(place) as nodes,
        spread_gang(place, nodes, misbehaves=misbehaves) as gang,
    ):
        await ready(place, within_s=30)
        first = running(place)
        await gang.broadcast(TrainStep(1, ()))
        await ready(place, 2, within_s=30)
        assert not alive(first)
        assert f"rank {rank} was killed by signal 9" in of(place, GangLost)[0].reason
        assert gang.status().num_failures == 1
        await gang.broadcast(TrainStep(1, ()))
        await until(lambda: trained(place, 2) == [0, 1], within_s=20)


async def test_the_loss_of_a_node_takes_the_gang_down_until_it_is_back(tmp_path):
    async with (
        site(tmp_path) as place,
        two_nodes(place) as nodes,
        spread_gang(place, nodes) as gang,
    ):
        await ready(place, within_s=30)
        first = running(place)
        nodes.net.is_silent = True
        await until(lambda: of(place, GangLost), within_s=30)
        assert "node 1 was lost" in of(place, GangLost)[0].reason
        assert not alive(first)
        assert gang.status().num_failures == 0
        await until(lambda: of(place, ChildWaiting), within_s=10)
        await clock.sleep(2 * TERMS.lease_s)
        assert not running(place)
        nodes.net.mend()
        await ready(place, 2, within_s=30)
        await gang.send(Rank(1), TrainStep(1, ()))
        await until(lambda: trained(place, 2) == [1], within_s=20)


async def test_gangs_of_one_attempt_on_one_node_are_told_apart_and_a_replica_ends_with_it(tmp_path):
    async with (
        site(tmp_path) as place,
        two_nodes(place) as nodes,
        spread_gang(place, nodes) as core,
        spread_gang(place, nodes, name=ChildId("hybrid-0"), num_here=0) as replica,
    ):
        await ready(place, 2, within_s=30)
        assert core.attempt == replica.attempt == 1
        assert (len(core.members), len(replica.members)) == (2, 1)
        agents = [nodes.hands.agent_of(it) for it in (core.members[1], replica.members[0])]
        assert [it.child_id for it in agents] == ["trainer-1", "hybrid-0-1"]
        await replica.broadcast(TrainStep(1, ()))
        await until(lambda: trained(place, 1) == [0], within_s=20)
        nodes.net.is_silent = True
        await until(lambda: of(place, GangGaveUp), within_s=30)
        assert "node 1 was lost" in of(place, GangGaveUp)[0].reason
        assert replica.status().state is ChildState.GAVE_UP
        await until(lambda: core.status().state is ChildState.WAITING, within_s=20)
        nodes.net.mend()
        await ready(place, 3, within_s=30)
        assert (core.attempt, replica.attempt) == (2, 1)
    for name, rank in (("trainer-1", 1), ("hybrid-0-1", 0)):
        assert f"rank {rank} argv" in (tmp_path / "logs" / f"{name}.log").read_text()


@pytest.mark.case("R-B79")
async def test_a_node_reads_a_published_version_once_for_all_its_servers(tmp_path, monkeypatch):
    monkeypatch.setattr(arrival, "LOOK_AGAIN_S", 0.01)
    directory, announced = publish_weights(tmp_path / "weights", 3)
    hidden = directory.with_name("hidden")
    directory.rename(hidden)
    async with site(tmp_path / "run") as place, two_nodes(place) as nodes:

        async def come():
            await clock.sleep(0.2)
            hidden.rename(directory)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(come)
            receipt = await nodes.node.read_weights(str(directory), announced)
        assert holds(receipt, directory, ["model.safetensors"])
        monkeypatch.setattr(arrival, "VISIBLE_WITHIN_S", 0.1)
        with pytest.raises(PeerError, match=r"node 1: .* announced was"):
            await nodes.node.read_weights(str(directory), "another")
        assert nodes.node.is_member


@pytest.fixture
def used(tmp_path, monkeypatch):
    """Say how much is in use of the follower's devices, of which a fake driver has four."""
    path = tmp_path / "used.json"
    monkeypatch.syspath_prepend(SUPPORT / "fake_driver")
    monkeypatch.setenv("FAKE_NVML", str(path))

    def set_used(**gib_of):
        path.write_text(json.dumps({name[1:]: it * 2**30 for name, it in gib_of.items()}))

    set_used()
    return set_used


def gate_of(nodes, *slots):
    look = partial(nodes.node.look_at_devices, slots)
    gate = DeviceGate(ChildId("vllm-0"), look, needed_fraction=0.9, where=" of node 1")
    return NodeGate(nodes.node, gate)


@pytest.mark.case("R-B50")
async def test_a_start_on_another_node_waits_until_its_device_there_is_free(tmp_path, used):
    async with site(tmp_path / "run") as place, two_nodes(place) as nodes:
        nodes.hands._devices = ("3", "2", "1", "1")
        used(_2=80, _1=80)
        assert await gate_of(nodes, 0).hindrance() is None
        reason = await gate_of(nodes, 0, 1).hindrance()
        assert reason.startswith(
            "waiting for GPU 2 of node 1: 80.0 of 100.0 GiB are in use (pid 4711)"
        )
        assert await gate_of(nodes, 2).hindrance() is None, "its neighbour's as well"
        assert "GPU 1 of node 1" in await gate_of(nodes, 2, 3).hindrance()
        used()
        assert await gate_of(nodes, 1).hindrance() is None
        both = all_of(gate_of(nodes, 0).hindrance, [gate_of(nodes, 1), gate_of(nodes, 2, 3)])
        assert await both() is None
        used(_2=80, _1=70)
        assert [it[12:27] for it in (await both()).split("; ")] == [
            "GPU 2 of node 1", "GPU 1 of node 1", "GPU 1 of node 1"
        ]  # fmt: skip

        async def first():
            return "a node is away"

        assert await all_of(first, [gate_of(nodes, 1)])() == "a node is away"
        used()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nodes.leader, "reigns", lambda: False)
            assert "a leader before this one" in await gate_of(nodes, 1).hindrance()
        nodes.net.cut()
        with anyio.fail_after(20):
            while nodes.node.is_member:
                await clock.sleep(0.05)
        assert (await gate_of(nodes, 1).hindrance()).startswith("node 1 is away")
        assert (await both()).startswith("node 1 is away")


async def test_what_cannot_be_looked_at_hinders_nothing(tmp_path, used, monkeypatch):
    """The start itself says what is wrong."""
    async with site(tmp_path / "run") as place, two_nodes(place) as nodes:
        assert await gate_of(nodes, 7).hindrance() is None
        with pytest.raises(PeerError, match="slots 7 are wanted here, and 2 devices are"):
            await nodes.node.look_at_devices((7,))
        nodes.hands._devices = ("0",)
        monkeypatch.delenv("FAKE_NVML")
        assert await gate_of(nodes, 0).hindrance() is None
        with pytest.raises(SiteError, match=r"node 1: .*Driver Not Loaded"):
            await nodes.node.look_at_devices((0,))
