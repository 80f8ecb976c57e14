"""The link over real sockets."""

from contextlib import suppress
from random import Random

import aiohttp
import anyio
import msgspec
import pytest

from libra import clock
from libra.errors import PeerError, SiteError
from libra.wire.node import MAX_ENVELOPE_BYTES, NODE_PATH, PROTOCOL, DropRank, Hello, Welcome
from libra_supervisor.nodes import leader as leader_module
from libra_supervisor.nodes.allegiance import Allegiance
from libra_supervisor.nodes.follower import FollowerEnd
from libra_supervisor.nodes.leader import LeaderEnd
from libra_supervisor.nodes.lease import LeaseTerms
from libra_supervisor.nodes.members import Charter, NodeJoined
from libra_supervisor.nodes.session import KeepLimits
from libra_supervisor.nodes.transport import dialled, follower_tls, leader_tls, node_listener

TOKEN = "a token of the nodes"
TERMS = LeaseTerms(lease_s=5.0, orphan_grace_s=5.0)
HELLO = Hello(
    protocol=PROTOCOL, version="1", config_digest="d", run_id="", node=1, host="h", boot_id="b",
    pid=1, start_ticks=1, dial=1,
)  # fmt: skip
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


def leader(news, terms=TERMS):
    async def post(event):
        news.append(event)

    charter = Charter(
        run_id="r", run_directory="/r", term=1, leader="L", version="1", config_digest="d",
        num_nodes=2, lease=terms,
    )  # fmt: skip
    return LeaderEnd(charter, post=post, rng=Random(1))


async def echo(connection):
    with suppress(PeerError):
        while (message := await connection.receive()) is not None:
            await connection.send(message)


async def answer_to(connection, message):
    """What comes back; None when the connection ends instead, at whichever moment."""
    try:
        await connection.send(message)
        return await connection.receive()
    except PeerError:
        return None


class NotingHands:
    def __init__(self):
        self.obeyed = []
        self.heard = anyio.Event()

    def children(self):
        return ()

    async def begin(self, welcome):
        pass

    async def obey(self, command):
        self.obeyed.append(command)
        self.heard.set()

    async def let_go(self, reason):
        pass

    async def end_servers(self, reason):
        pass


@pytest.mark.case("R-B36")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_node_joins_and_is_told_things_past_any_proxy(host, monkeypatch):
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    news, hands = [], NotingHands()
    end = leader(news)
    async with (
        node_listener(end.serve, host=host, port=0, token=TOKEN) as port,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(end.run)
        side = Allegiance(HELLO, TERMS, KeepLimits(), now=clock.now())
        follower = FollowerEnd(
            side, hands, dial=lambda: dialled(host, port, token=TOKEN), rng=Random(2)
        )
        tasks.start_soon(follower.run)
        while not news:
            await clock.sleep(0.01)
        assert isinstance(news[0], NodeJoined)
        end.tell(1, DropRank(0))
        await hands.heard.wait()
        tasks.cancel_scope.cancel()
    assert hands.obeyed == [DropRank(0)]


@pytest.mark.case("R-B102")
@pytest.mark.parametrize("given", ["", "another token", "ä", TOKEN[:-1]])
async def test_another_token_is_refused_before_anything_is_read(given):
    served = []

    async def serve(connection):
        served.append(connection)

    async with node_listener(serve, host="127.0.0.1", port=0, token=TOKEN) as port:
        with pytest.raises(PeerError, match="has another token"):
            async with dialled("127.0.0.1", port, token=given):
                pass
        async with (
            aiohttp.ClientSession() as plain,
            plain.get(f"http://127.0.0.1:{port}{NODE_PATH}") as answer,
        ):
            assert answer.status == 401
        async with (
            aiohttp.ClientSession() as plain,
            plain.get(
                f"http://127.0.0.1:{port}/v1/status", headers={"Authorization": f"Bearer {TOKEN}"}
            ) as answer,
        ):
            assert answer.status == 404
    assert not served


async def test_messages_keep_their_limits_and_their_kind():
    async with node_listener(echo, host="127.0.0.1", port=0, token=TOKEN) as port:
        async with dialled("127.0.0.1", port, token=TOKEN) as connection:
            whole = b"x" * (MAX_ENVELOPE_BYTES - 100)
            assert await answer_to(connection, whole) == whole
            assert await answer_to(connection, b"x" * (MAX_ENVELOPE_BYTES + 1)) is None
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as plain,
            plain.ws_connect(f"http://127.0.0.1:{port}{NODE_PATH}") as socket,
        ):
            await socket.send_str("text")
            assert (await socket.receive()).type is not aiohttp.WSMsgType.TEXT


async def test_nobody_there_and_a_stranger_there_are_errors_of_the_peer():
    with pytest.raises(PeerError, match=r"no leader at 127\.0\.0\.1 port 9"):
        async with dialled("127.0.0.1", 9, token=TOKEN):
            pass
    async with node_listener(echo, host="127.0.0.1", port=0, token=TOKEN) as port:
        with pytest.raises(SiteError, match="cannot be used"):
            async with node_listener(echo, host="127.0.0.1", port=port, token=TOKEN):
                pass


async def test_with_tls_the_leader_proves_who_it_is(certificates):
    cert, key = certificates
    end = leader([])
    async with (
        node_listener(
            end.serve, host="localhost", port=0, token=TOKEN, tls=leader_tls(cert, key)
        ) as port,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(end.run)
        # Followers have the authority alone; the key stays with the leader.
        async with dialled(
            "localhost", port, token=TOKEN, tls=follower_tls("", cert)
        ) as connection:
            await connection.send(msgspec.msgpack.encode(HELLO))
            answer = msgspec.msgpack.decode(await connection.receive(), type=Welcome)
            assert answer.term == 1
        for tls, said in (
            (
                follower_tls(cert, ""),
                "node_tls_ca did not sign the certificate of the leader at lo",
            ),
            (None, "closed the connection: a leader with node_tls_cert does so where a follower"),
        ):
            with pytest.raises(PeerError, match=said):
                async with dialled("localhost", port, token=TOKEN, tls=tls):
                    pass
        with pytest.raises(PeerError, match=r"leader at 127\.0\.0\.1 port \d+ names another host"):
            async with dialled("127.0.0.1", port, token=TOKEN, tls=follower_tls(cert, cert)):
                pass
        tasks.cancel_scope.cancel()


def test_certificates_that_cannot_be_used_are_the_site_s_fault(certificates, tmp_path):
    cert, _ = certificates
    broken = tmp_path / "x.pem"
    broken.write_text("no certificate")
    with pytest.raises(SiteError, match="node_tls_cert"):
        leader_tls(cert, str(broken))
    with pytest.raises(SiteError, match="node_tls_ca"):
        follower_tls(cert, str(broken))
    assert leader_tls("", "") is None
    assert follower_tls("", "") is None
    with pytest.raises(SiteError, match="the leader needs node_tls_cert"):
        leader_tls("", "", cert)


@pytest.mark.timeout(60)
async def test_who_waits_for_room_on_the_way_to_a_node_hears_of_its_loss(monkeypatch):
    monkeypatch.setattr(leader_module, "WINDOW_BYTES", 0)
    end = leader([], LeaseTerms(lease_s=0.2, orphan_grace_s=0.2))
    async with (
        node_listener(end.serve, host="127.0.0.1", port=0, token=TOKEN) as port,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(end.run)
        async with dialled("127.0.0.1", port, token=TOKEN) as connection:
            await connection.send(msgspec.msgpack.encode(HELLO))
            await connection.receive()
            # From here on it is silent: what it is told is never acknowledged.
            end.tell(1, DropRank(0))
            with pytest.raises(PeerError, match="node 1 was lost"):
                await end.tell_when_room(1, DropRank(1))
        tasks.cancel_scope.cancel()


async def test_a_leader_without_tls_is_no_leader_to_who_wants_it(certificates):
    cert, _ = certificates
    async with node_listener(echo, host="127.0.0.1", port=0, token=TOKEN) as port:
        with pytest.raises(PeerError, match=f"at localhost port {port} speaks no TLS: a leader"):
            async with dialled("localhost", port, token=TOKEN, tls=follower_tls("", cert)):
                pass


async def test_why_nobody_answers_is_said_once():
    with pytest.raises(PeerError) as found:
        async with dialled("127.0.0.1", 9, token=TOKEN):
            pass
    assert str(found.value) == "no leader at 127.0.0.1 port 9: Connection refused"
    with pytest.raises(PeerError) as found:
        async with dialled("nowhere.invalid", 9, token=TOKEN):
            pass
    assert str(found.value).startswith("no leader at nowhere.invalid port 9: ")
    assert str(found.value).count("nowhere.invalid") == 1
