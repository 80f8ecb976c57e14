"""What a follower knows of servers, by what its leader says of them."""

from contextlib import asynccontextmanager
from random import Random

import anyio
import pytest

from libra import clock
from libra.config.rollout import SchedulingConfig
from libra.errors import PeerError
from libra.scheduling.scheduler import Scheduler
from libra.wire.node_rollouts import ServerEntry, Servers
from libra_supervisor.app.followed_servers import FollowedServers

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


def entry(name, incarnation="a", **changes):
    known = {"version": 3, "is_ready": True, "kv_capacity_tokens": 1000, **changes}
    return ServerEntry(
        instance_id=name, incarnation=incarnation, url="http://127.0.0.1:9", tp=2,
        is_planned=False, **known,
    )  # fmt: skip


class Followed:
    def __init__(self):
        config = SchedulingConfig()
        self.scheduler = Scheduler(config)
        self.servers = FollowedServers(self.scheduler, config, token="t", rng=Random(1))
        self.revision = 0

    async def say(self, *changed, gone=(), wanted=3):
        self.revision += 1
        self.servers.take(
            Servers(revision=self.revision, wanted=wanted, changed=changed, gone=gone)
        )
        await anyio.wait_all_tasks_blocked()

    def views(self):
        return {
            it.instance_id: (it.incarnation, it.policy_version, it.removed_by)
            for it in self.scheduler.instances(clock.now())
        }


@asynccontextmanager
async def followed():
    found = Followed()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(found.servers.run)
        await anyio.wait_all_tasks_blocked()
        yield found
        tasks.cancel_scope.cancel()


async def test_servers_come_change_and_go_with_what_the_leader_says():
    async with followed() as found:
        await found.say(entry("vllm-0"), entry("vllm-1", is_ready=False))
        assert found.views()["vllm-0"] == ("a", 3, None)
        assert found.views()["vllm-1"][2] is not None
        client = found.servers.client_of("vllm-0")
        await found.say(entry("vllm-0", version=4), wanted=4)
        assert found.views()["vllm-0"] == ("a", 4, None)
        assert found.servers.client_of("vllm-0") is client
        assert (found.servers.wanted, found.servers.revision) == (4, 2)
        await found.say(entry("vllm-0", is_draining=True))
        assert found.views()["vllm-0"][2] is not None
        await found.say(entry("vllm-0", "b", version=4))
        assert found.views()["vllm-0"] == ("b", 4, None)
        assert found.servers.client_of("vllm-0") is not client
        connections = [it.name for it in anyio.get_running_tasks() if "_follow" in str(it.name)]
        assert len(connections) == 2
        await found.say(gone=("vllm-0",))
        assert list(found.views()) == ["vllm-1"]
        for ask in (found.servers.client_of, found.servers.watch_of):
            with pytest.raises(PeerError, match="no part of the run"):
                ask("vllm-9")
        with pytest.raises(PeerError, match="no part of the run"):
            found.servers.client_of("vllm-0")


async def test_a_server_of_unknown_capacity_is_routed_to_and_its_figure_may_come_later():
    async with followed() as found:

        def capacity():
            (view,) = found.scheduler.instances(clock.now())
            return view.removed_by, view.kv_capacity_tokens

        await found.say(entry("vllm-0", kv_capacity_tokens=None))
        assert capacity() == (None, None)
        await found.say(entry("vllm-0", kv_capacity_tokens=1000))
        assert capacity() == (None, 1000)


async def test_what_was_said_before_it_ran_is_taken_in_when_it_does():
    found = Followed()
    found.servers.take(Servers(revision=1, wanted=3, changed=(entry("vllm-0"),)))
    assert found.views() == {}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(found.servers.run)
        await anyio.wait_all_tasks_blocked()
        assert found.views() == {"vllm-0": ("a", 3, None)}
        tasks.cancel_scope.cancel()


async def test_a_server_that_goes_while_it_is_connected_to_is_never_routed_to():
    async with followed() as found:
        found.servers.take(Servers(revision=1, wanted=3, changed=(entry("vllm-0"),)))
        found.servers.take(Servers(revision=2, wanted=3, changed=(), gone=("vllm-0",)))
        await anyio.wait_all_tasks_blocked()
        assert found.views() == {}
