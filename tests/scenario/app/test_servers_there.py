"""Processes, versions and restarts of servers as followers route to them: the leader's roster as it
crosses the link, schedulers and connections as they are."""

from contextlib import asynccontextmanager
from random import Random

import anyio
import msgspec
import pytest

from fake_vllm import FakeVllm
from fleets import place, request, scheduling
from libra import clock
from libra.scheduling.request import Wait
from libra.scheduling.scheduler import Scheduler
from libra.wire.node_rollouts import Servers
from libra_supervisor.app.followed_servers import FollowedServers
from libra_supervisor.rollouts.roster import Roster
from processes import until

NOBODY = "http://127.0.0.1:9"
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


class Follower:
    def __init__(self, **options):
        config = scheduling(**options)
        self.scheduler = Scheduler(config)
        self.servers = FollowedServers(self.scheduler, config, token="t", rng=Random(1))

    def routed(self, **what):
        """Where one of its own requests goes."""
        what = {"min_version": self.servers.wanted, **what}
        return self.scheduler.route(request(**what), clock.now())

    def placed(self, **what):
        return place(self.scheduler, clock.now(), min_version=self.servers.wanted, **what)

    def view(self, name):
        return next(it for it in self.scheduler.instances(clock.now()) if it.instance_id == name)


class Cluster:
    """One leader's roster and two followers."""

    def __init__(self, **options):
        self.roster = Roster()
        self.followers = [Follower(**options) for _ in range(2)]

    def begin(self, name, incarnation="a", *, url=NOBODY, is_planned=False):
        self.roster.know(
            name, incarnation, url=url, tp=1, kv_capacity_tokens=1000, is_planned=is_planned
        )

    async def tell(self):
        data = msgspec.msgpack.encode(self.roster.take_changes())
        for it in self.followers:
            it.servers.take(msgspec.msgpack.decode(data, type=Servers))
        await anyio.wait_all_tasks_blocked()

    async def serve(self, version, *names):
        for name in names:
            self.roster.serve(name, version)
        await self.tell()


@asynccontextmanager
async def cluster(**options):
    made = Cluster(**options)
    async with anyio.create_task_group() as tasks:
        for it in made.followers:
            tasks.start_soon(it.servers.run)
        await anyio.wait_all_tasks_blocked()
        yield made
        tasks.cancel_scope.cancel()


@pytest.mark.case("R-B86")
async def test_a_restarted_server_gets_nothing_from_any_node_until_it_has_proved_the_version():
    async with cluster() as made:
        made.begin("vllm-0")
        await made.serve(7, "vllm-0")
        made.begin("vllm-0", "b")
        await made.tell()
        waiting = [it.routed() for it in made.followers]
        assert [type(it) for it in waiting] == [Wait, Wait]
        await made.serve(7, "vllm-0")
        outcomes = [it.ticket.outcome for it in waiting]
        assert [it.reservation.incarnation for it in outcomes] == ["b", "b"]


@pytest.mark.case("R-B12", "R-B24")
async def test_of_a_process_that_is_gone_a_new_one_has_neither_load_nor_prompts():
    async with cluster(prefix_affinity=True) as made:
        made.begin("vllm-0")
        await made.serve(7, "vllm-0")
        old = [[it.placed(prompt="p") for _ in range(20)] for it in made.followers]
        made.begin("vllm-0", "b")
        await made.serve(7, "vllm-0")
        for follower, reservations in zip(made.followers, old, strict=True):
            assert follower.view("vllm-0").own_requests == 0
            assert follower.placed(prompt="p").incarnation == "b"
            assert follower.scheduler.affinity_counts.num_broken == 1
            # Late words of the old one take nothing from the new one.
            for reservation in reservations:
                follower.scheduler.complete(reservation, 5, clock.now())
            assert follower.scheduler.own_load()[0].num_requests == 1


async def test_a_process_that_a_reload_has_put_there_keeps_the_prompts_of_the_one_before():
    async with cluster(prefix_affinity=True) as made:
        made.begin("vllm-0")
        await made.serve(7, "vllm-0")
        for follower in made.followers:
            follower.placed(prompt="p")
        made.begin("vllm-0", "b", is_planned=True)
        await made.serve(8, "vllm-0")
        for follower in made.followers:
            follower.placed(prompt="p")
            assert follower.scheduler.affinity_counts.num_kept == 1


@pytest.mark.case("R-B12")
async def test_a_restart_that_only_its_metrics_show_takes_a_server_out_until_the_leader_knows():
    feedback = {"enable_metrics_feedback": True, "metrics_poll_interval_s": 0.02}
    async with FakeVllm("vllm-0", token="t") as server, cluster(**feedback) as made:

        def started_at(seconds):
            server.metrics_text = f"process_start_time_seconds {seconds}.0\n"

        started_at(1000)
        made.begin("vllm-0", url=server.url)
        await made.serve(7, "vllm-0")
        for it in made.followers:
            await until(lambda it=it: it.view("vllm-0").snapshot_age_s is not None)
            assert it.placed().incarnation == "a"
        started_at(2000)
        for it in made.followers:
            await until(lambda it=it: it.view("vllm-0").incarnation != "a")
            assert it.view("vllm-0").own_requests == 0
            assert isinstance(it.routed(), Wait)
        made.begin("vllm-0", "b", url=server.url)
        await made.serve(7, "vllm-0")
        assert {it.placed().incarnation for it in made.followers} == {"b"}


@pytest.mark.case("R-B90")
async def test_a_server_that_missed_a_version_is_known_with_its_own_on_every_node():
    async with cluster() as made:
        names = ("vllm-0", "vllm-1", "vllm-2")
        for name in names:
            made.begin(name)
        await made.serve(7, *names)
        made.roster.withdraw("vllm-2", is_draining=False)
        await made.serve(8, "vllm-0", "vllm-1")
        for follower in made.followers:
            assert [follower.view(name).policy_version for name in names] == [8, 8, 7]
            # Not even what would be content with the older one goes there.
            reservations = [follower.placed(), follower.placed()]
            reservations += [place(follower.scheduler, clock.now()) for _ in range(4)]
            assert {it.instance_id for it in reservations} == {"vllm-0", "vllm-1"}
            assert {it.policy_version for it in reservations} == {8}
        await made.serve(8, "vllm-2")
        assert all(it.placed().instance_id == "vllm-2" for it in made.followers)


@pytest.mark.case("R-B87")
async def test_versions_of_an_attempt_that_was_given_up_are_served_to_nobody():
    """The ranks went back to the checkpoint of step 2 when version 3 was served everywhere."""
    async with cluster() as made:
        made.begin("vllm-0")
        made.begin("vllm-1")
        await made.serve(3, "vllm-0", "vllm-1")
        for name in ("vllm-0", "vllm-1"):
            made.roster.withdraw(name, is_draining=False)
        await made.tell()
        waiting = [it.routed(min_version=2) for it in made.followers]
        await made.serve(2, "vllm-0")
        for follower, one in zip(made.followers, waiting, strict=True):
            assert follower.servers.wanted == 2
            reservations = [one.ticket.outcome.reservation, follower.placed()]
            assert [(it.instance_id, it.policy_version) for it in reservations] == [
                ("vllm-0", 2)
            ] * 2
        await made.serve(2, "vllm-1")
        for follower in made.followers:
            assert follower.placed().instance_id == "vllm-1"


@pytest.mark.case("R-B29")
async def test_a_server_that_is_drained_once_more_may_get_requests_until_it_is_read_once_more():
    async with cluster() as made:
        made.begin("vllm-0")
        await made.serve(3, "vllm-0")
        for version in (4, 5):
            read = made.roster.revision
            made.roster.withdraw("vllm-0", is_draining=True)
            assert made.roster.may_still_get_requests("vllm-0", read=read)
            await made.tell()
            assert not made.roster.may_still_get_requests("vllm-0", read=made.roster.revision)
            await made.serve(version, "vllm-0")
