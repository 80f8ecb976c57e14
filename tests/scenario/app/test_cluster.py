"""The leader's cluster over real sockets: who is told to leave, and who leads instead."""

import os
from contextlib import asynccontextmanager
from math import inf
from threading import Event

import anyio
import msgspec
import pytest

from libra import clock
from libra.config.model import ModelConfig
from libra.config.run import RunConfig
from libra.errors import SiteError
from libra.ids import NodeRank, RunId
from libra.version import __version__
from libra.wire.node import PROTOCOL, Envelope, Hello, KeepOnly, Leave, NodeCommand, StopAsked
from libra_supervisor import events
from libra_supervisor.app import cluster as cluster_module
from libra_supervisor.app.cluster import Cluster
from libra_supervisor.app.shared_config import config_digest
from libra_supervisor.instances.port_lease import lease_port
from libra_supervisor.nodes.site import Site
from libra_supervisor.nodes.term import RunEnd, TermRecord, read_term, take_term
from libra_supervisor.nodes.transport import dialled
from libra_supervisor.run_directory import RunDirectory

TOKEN = "a token of the nodes"
CONFIG = RunConfig(model=ModelConfig(model_path="m"))
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Bed:
    def __init__(self, root):
        port = lease_port("127.0.0.1")
        port.close()
        self.posted = []
        self.site = Site(hosts=("127.0.0.1",) * 3, port=port.port, rank=NodeRank(0))
        self.directory = RunDirectory(root)
        self.directory.create()
        self.cluster = Cluster(
            self.directory, CONFIG, RunId("r"), site=self.site, token=TOKEN, post=self.post
        )
        self.cluster.let_stay({})

    async def post(self, event):
        self.posted.append(event)

    @asynccontextmanager
    async def member(self, node, **changes):
        """A follower whose words are written by hand."""
        hello = Hello(
            protocol=PROTOCOL, version=__version__, config_digest=config_digest(CONFIG),
            run_id="r", node=node, host="h", boot_id=f"b{node}", pid=1, start_ticks=1, dial=1,
        )  # fmt: skip
        hello = msgspec.structs.replace(hello, **changes)
        async with dialled("127.0.0.1", self.site.port, token=TOKEN) as connection:
            await connection.send(msgspec.msgpack.encode(hello))
            await connection.receive()
            if not changes:
                assert events.NodeJoined(NodeRank(node)) in self.posted
            yield connection


async def said(connection):
    """The next command."""
    while True:
        envelope = msgspec.msgpack.decode(await connection.receive(), type=Envelope)
        if envelope.number:
            return envelope.number, msgspec.msgpack.decode(envelope.body, type=NodeCommand)


async def test_all_members_are_dismissed_whatever_became_of_a_session(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_module, "_DISMISS_S", inf)
    bed = Bed(tmp_path)
    async with bed.cluster.running(), bed.member(1) as first, bed.member(2) as second:
        assert await said(first) == (1, KeepOnly(()))
        assert await said(second) == (1, KeepOnly(()))
        await first.send(msgspec.msgpack.encode(Envelope(99, 1)))
        while await first.receive() is not None:
            pass
        assert bed.cluster.nodes[NodeRank(1)].is_member
        dismissed = anyio.Event()

        async def dismiss():
            await bed.cluster.dismiss(4, "a child failed")
            dismissed.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(dismiss)
            assert await said(second) == (2, Leave(4, "a child failed"))
            # Who is there is waited for, until it has the word.
            await clock.sleep(0.3)
            assert not dismissed.is_set()
            await second.send(msgspec.msgpack.encode(Envelope(2, 1)))
            await dismissed.wait()
        states = [status.state for status in bed.cluster.status(lambda _: "")]
        assert states == ["leads", "suspected", "member"]


async def test_why_a_node_is_refused_is_in_status_until_it_is_taken_in(tmp_path):
    bed = Bed(tmp_path)

    def detail():
        return bed.cluster.status(lambda _: "")[1].detail

    async with bed.cluster.running():
        async with bed.member(1, term=2):
            assert detail() == "refused: it has obeyed term 2, this is 1"
        async with bed.member(1):
            assert detail() == ""


async def test_a_stop_on_another_node_ends_the_run_with_the_code_that_it_has_here(tmp_path):
    bed = Bed(tmp_path)
    async with bed.cluster.running(), bed.member(1) as first:
        asked = msgspec.msgpack.encode(StopAsked("SIGINT on node 1", in_hurry=False, exit_code=130))
        await first.send(msgspec.msgpack.encode(Envelope(0, 1, 1, asked)))
        known = events.StopRequested("SIGINT on node 1", now=False, exit_code=130)
        with anyio.fail_after(10):
            while known not in bed.posted:
                await clock.sleep(0.01)


async def test_who_was_replaced_says_by_whom(tmp_path):
    bed = Bed(tmp_path)
    await bed.cluster.check_after_stall(inf)
    take_term(tmp_path, "another")
    await bed.cluster.check_after_stall(0.0)
    with pytest.raises(SiteError, match=r"another leader \(term 2\) took over .* \(term 1, pid"):
        await bed.cluster.check_after_stall(inf)


async def test_a_leader_whose_term_is_gone_from_the_disk_says_so(tmp_path):
    bed = Bed(tmp_path)
    (tmp_path / "term.json").unlink()
    with pytest.raises(SiteError) as found:
        await bed.cluster.check_after_stall(inf)
    assert str(found.value) == (
        f"{tmp_path}/term.json, which says that this process (term 1, pid {os.getpid()}) leads, is "
        "gone: somebody removed it or the run directory, and another leader may have begun"
    )


async def test_who_joins_while_the_others_are_dismissed_is_dismissed_too(tmp_path):
    bed = Bed(tmp_path)
    async with bed.cluster.running(), bed.member(1) as first, anyio.create_task_group() as tasks:
        tasks.start_soon(bed.cluster.dismiss, 0, "all steps are trained")
        assert await said(first) == (1, KeepOnly(()))
        assert await said(first) == (2, Leave(0, "all steps are trained"))
        async with bed.member(2) as late:
            assert await said(late) == (1, KeepOnly(()))
            assert await said(late) == (2, Leave(0, "all steps are trained"))
            for connection in (first, late):
                await connection.send(msgspec.msgpack.encode(Envelope(2, 1)))
    record = read_term(tmp_path)
    assert record.end == RunEnd(0, "all steps are trained")
    # A run that is resumed is not over.
    take_term(tmp_path, "another")
    assert read_term(tmp_path).end is None


async def test_a_leader_that_was_replaced_ends_nobody_s_run(tmp_path):
    bed = Bed(tmp_path)
    take_term(tmp_path, "another")
    await bed.cluster.dismiss(5, "taken over")
    assert read_term(tmp_path) == TermRecord(2, "another")


async def test_a_disk_that_hangs_holds_up_no_dismissal(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_module, "_DISMISS_S", 0.2)
    bed, hangs = Bed(tmp_path), Event()
    monkeypatch.setattr(cluster_module, "end_term", lambda *_: hangs.wait(60))
    async with bed.cluster.running(), bed.member(1) as member:
        with anyio.fail_after(20):
            await bed.cluster.dismiss(0, "all steps are trained")
        assert await said(member) == (1, KeepOnly(()))
        assert await said(member) == (2, Leave(0, "all steps are trained"))
    hangs.set()
