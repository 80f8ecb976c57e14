"""Ends of children on another node, whoever wants them ended and how often."""

import sys

import anyio
import pytest

from libra.ids import Incarnation
from libra_supervisor.nodes.remote_child import RemoteSpawner
from libra_supervisor.process.tree import StopDeadlines
from processes import alive, site, until
from two_nodes import two_nodes

pytestmark = pytest.mark.anyio
CLEANS_UP = """
import signal, sys, time
def note(*_):
    print("asked to end", flush=True)
signal.signal(signal.SIGTERM, note)
print("up", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


@pytest.mark.case("R-B56")
@pytest.mark.parametrize("second", ["its node leaves", "a new session claims nothing"])
async def test_a_server_that_is_being_ended_is_asked_once_whatever_else_wants_its_end(
    tmp_path, second
):
    """A second SIGTERM would interrupt the clean-up that the first has begun."""
    async with site(tmp_path) as place, two_nodes(place) as nodes:
        spec = place.spec(sys.executable, "-S", "-c", CLEANS_UP)
        server = await RemoteSpawner(nodes.node).spawn(spec, Incarnation("child-1"))
        log = place.run_dir / "logs" / "child.log"
        await until(lambda: log.exists() and "up" in log.read_text())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.tree.end, StopDeadlines(term_grace_s=30, kill_wait_s=5))
            await until(lambda: "asked to end" in log.read_text())
            if second == "its node leaves":
                await nodes.hands.end_servers("the test leaves")
            else:
                nodes.net.cut()
                await until(lambda: not nodes.node.is_member)
                nodes.net.mend()
            await until(lambda: not alive([server.identity.pid]), within_s=20)
        assert log.read_text().count("asked to end") == 1
