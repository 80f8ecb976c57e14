"""Strangers at the leader's port: how long each may stay, and how many."""

import socket
import ssl
from contextlib import asynccontextmanager, suppress
from math import inf

import anyio
import pytest
from structlog.testing import capture_logs

from libra import clock
from libra.errors import PeerError
from libra_supervisor.nodes import door as door_module
from libra_supervisor.nodes import transport
from libra_supervisor.nodes.door import Door, StrangersLine
from libra_supervisor.nodes.transport import dialled, node_listener

TOKEN = "a token of the nodes"
pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request):
    return "asyncio", {"use_uvloop": request.param}


async def echo(connection):
    with suppress(PeerError):
        while (message := await connection.receive()) is not None:
            await connection.send(message)


@asynccontextmanager
async def listening(*, tls=None, num_followers=0):
    async with node_listener(
        echo, host="127.0.0.1", port=0, token=TOKEN, tls=tls, num_followers=num_followers
    ) as port:
        yield port


@asynccontextmanager
async def stranger(port, words=b""):
    """A bare connection that has said these words."""
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        if words:
            await stream.send(words)
        yield stream


async def is_closed(stream):
    """Whether the other end closes the connection within a moment; what it says is ignored."""
    with anyio.move_on_after(0.3):
        try:
            while True:
                await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return True
    return False


async def until_closed(stream):
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError), anyio.fail_after(30):
        while True:
            await stream.receive()


GET = b"GET /v1/node HTTP/1.1\r\nHost: h\r\n"


@pytest.mark.parametrize(
    "words",
    [b"", b"GET /v1/no", GET, GET + b"Authorization: Bearer wrong\r\n\r\n", GET + b"\r\n"],
    ids=["nothing", "half a line", "half a head", "another token", "no token"],
)
async def test_who_shows_no_token_in_time_is_put_out_and_who_did_stays(monkeypatch, words):
    monkeypatch.setattr(door_module, "PROOF_WAIT_S", 2.0)
    async with listening() as port, dialled("127.0.0.1", port, token=TOKEN) as member:
        began_at = clock.now()
        async with stranger(port, words) as stream:
            await until_closed(stream)
        assert clock.now() - began_at >= 2.0
        await member.send(b"still there")
        assert await member.receive() == b"still there"


async def test_a_crowd_of_strangers_makes_room_for_whoever_comes(monkeypatch):
    monkeypatch.setattr(door_module, "PROOF_WAIT_S", inf)
    monkeypatch.setattr(transport, "MOST_STRANGERS", 2)
    async with (
        listening(num_followers=1) as port,
        dialled("127.0.0.1", port, token=TOKEN) as member,
        stranger(port) as first,
        stranger(port) as second,
        stranger(port) as third,
    ):
        assert not await is_closed(first)
        async with stranger(port) as fourth:
            await until_closed(first)
            assert not await is_closed(second)
            # In a crowd, who has the token needs no luck.
            async with dialled("127.0.0.1", port, token=TOKEN) as late:
                await until_closed(second)
                async with stranger(port), stranger(port), stranger(port):
                    for stream in (third, fourth):
                        await until_closed(stream)
                    for connection in (member, late):
                        await connection.send(b"hello")
                        assert await connection.receive() == b"hello"


async def test_strangers_that_have_left_make_room_before_those_that_stay(monkeypatch):
    monkeypatch.setattr(door_module, "PROOF_WAIT_S", inf)
    monkeypatch.setattr(transport, "MOST_STRANGERS", 2)
    async with listening() as port, stranger(port) as first:
        async with stranger(port):
            pass
        await clock.sleep(0.2)
        async with stranger(port):
            assert not await is_closed(first)


async def test_who_has_shown_the_token_is_no_stranger_any_more(monkeypatch):
    monkeypatch.setattr(transport, "MOST_STRANGERS", 2)
    monkeypatch.setattr(door_module, "PROOF_WAIT_S", inf)
    doors = []

    def door(*arguments, **options):
        doors.append(Door(*arguments, **options))
        return doors[0]

    monkeypatch.setattr(transport, "Door", door)
    async with listening() as port, stranger(port) as first:
        for _ in range(4):
            async with dialled("127.0.0.1", port, token=TOKEN):
                assert not await is_closed(first)
        assert doors[0].num_strangers == len(doors[0]._of_protocol) == 1


async def test_a_handshake_is_part_of_the_time(monkeypatch, certificates):
    monkeypatch.setattr(door_module, "PROOF_WAIT_S", 2.0)
    cert, key = certificates
    tls = transport.leader_tls(cert, key)
    async with listening(tls=tls) as port:
        async with stranger(port) as silent, stranger(port, b"no handshake\r\n\r\n") as loud:
            await until_closed(loud)
            await until_closed(silent)
        context = ssl.create_default_context(cafile=cert)
        async with await anyio.connect_tcp(
            "localhost", port, ssl_context=context, tls_standard_compatible=False
        ) as stream:
            await until_closed(stream)
        follower = transport.follower_tls("", cert)
        async with dialled("localhost", port, token=TOKEN, tls=follower) as member:
            await clock.sleep(2.2)
            await member.send(b"hello")
            assert await member.receive() == b"hello"


async def test_when_nobody_listens_any_more_nobody_is_kept():
    async with listening() as port:
        stream = await anyio.connect_tcp("127.0.0.1", port)
        await clock.sleep(0.2)
    async with stream:
        await until_closed(stream)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 5)


GARBAGE = {
    "no method": b"\x00\x01\x02\r\n\r\n",
    "no version": b"GET / HTTP/x\r\n\r\n",
    "bad length": GET + b"Content-Length: x\r\n\r\n",
    "long head": GET + b"X: " + b"x" * 100_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("words", GARBAGE.values(), ids=GARBAGE)
async def test_what_strangers_send_is_one_line_for_many_of_them(caplog, words):
    with capture_logs() as logs:
        async with listening() as port:
            for _ in range(3):
                async with stranger(port, words) as stream:
                    await until_closed(stream)
    assert [(it["event"], it["others"]) for it in logs] == [("node_port_stranger", 0)]
    assert "it sent no request" in logs[0]["why"]
    assert caplog.records == []


async def test_what_is_left_out_is_counted_with_the_next_line():
    line = StrangersLine()
    with capture_logs() as logs:
        for _ in range(4):
            line.say("nonsense")
        line._not_before = 0.0
        line.say("nonsense")
        assert [it["others"] for it in logs] == [0, 3]


async def test_a_fault_of_our_own_is_no_stranger_s(caplog):
    async def fails(_connection):
        raise ZeroDivisionError

    async with node_listener(fails, host="127.0.0.1", port=0, token=TOKEN) as port:
        async with dialled("127.0.0.1", port, token=TOKEN) as connection:
            with suppress(PeerError):
                await connection.receive()
        await clock.sleep(0.1)
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]


async def test_each_mismatch_of_tls_is_said_in_words(certificates):
    cert, key = certificates
    tls = transport.leader_tls(cert, key)
    with capture_logs() as plain:
        async with listening() as port:
            with suppress(PeerError):
                follower = transport.follower_tls("", cert)
                async with dialled("127.0.0.1", port, token=TOKEN, tls=follower):
                    pass
    with capture_logs() as crypted:
        for dial in (None, transport.follower_tls(cert, "")):
            async with listening(tls=tls) as port:
                with suppress(PeerError):
                    async with dialled("localhost", port, token=TOKEN, tls=dial):
                        pass
                await clock.sleep(0.1)
    assert [it["why"] for it in plain] == [
        "it speaks TLS, which needs node_tls_cert and node_tls_key here"
    ]
    first, second = (it["why"] for it in crypted)
    assert first == "it speaks no TLS; a follower needs node_tls_ca"
    assert "where its node_tls_ca did not sign node_tls_cert, or that names another host" in second
