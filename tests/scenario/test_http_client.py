"""The HTTP client against servers that answer byte by byte as they are told."""

import asyncio
import contextlib
import socket
import struct

import anyio
import pytest

from libra import clock
from libra_supervisor.http import answer as answer_module
from libra_supervisor.http.client import HttpClient
from libra_supervisor.http.errors import LostError, NotConnectedError
from libra_supervisor.http.request import Request, head_of, origin_of

pytestmark = pytest.mark.anyio
OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request):
    return "asyncio", {"use_uvloop": request.param}


def reset_at_close(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Script:
    """A server that reads a request and then plays the next of its answers.

    An answer is a list: bytes are sent, numbers are seconds of silence, None closes and "reset"
    aborts the connection, "end" waits until the client has closed it. After an answer without
    one of these the connection stays open.
    """

    def __init__(self, *answers, host="127.0.0.1"):
        self.answers, self.host = list(answers), host
        self.requests = []
        self._tasks = []
        self.saw_end = asyncio.Event()
        self.num_connections = 0
        self.num_open = 0
        self.reads_bodies = True

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, self.host, 0, limit=2**20)
        self.port = self._server.sockets[0].getsockname()[1]
        shown = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"http://{shown}:{self.port}"
        return self

    async def __aexit__(self, *_exc):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        with anyio.fail_after(10):
            while self.num_open:
                await clock.sleep(0.005)

    async def _serve(self, reader, writer):
        self._tasks.append(asyncio.current_task())
        with contextlib.suppress(asyncio.CancelledError):
            await self._converse(reader, writer)

    async def _converse(self, reader, writer):
        self.num_connections += 1
        self.num_open += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    await self._read(reader)
                    if not await self._play(reader, writer, self.answers.pop(0)):
                        return
        finally:
            self.num_open -= 1
            writer.close()

    async def _read(self, reader):
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(head)
        for line in head.lower().split(b"\r\n") if self.reads_bodies else ():
            if line.startswith(b"content-length:"):
                self.requests[-1] += await reader.readexactly(int(line[15:]))

    async def _play(self, reader, writer, answer):
        for part in answer:
            if part is None:
                return False
            if part == "end":
                await reader.read()
                self.saw_end.set()
                return False
            if part == "reset":
                reset_at_close(writer.get_extra_info("socket"))
                return False
            if isinstance(part, bytes):
                writer.write(part)
                await writer.drain()
            else:
                await clock.sleep(part)
        return True


@pytest.fixture
async def http():
    async with HttpClient(idle_s=5.0) as client:
        yield client


def request_to(server, *, method="GET", body=None, **headers):
    return Request(
        base_url=server.url, method=method, path="/p", headers=headers, body=body, connect_s=2.0
    )


async def content_of(answer):
    pieces = []
    while piece := await answer.next_piece():
        pieces.append(piece)
    return b"".join(pieces)


async def get(http, server, **options):
    answer = await http.ask(request_to(server), **options)
    return answer.status, await content_of(answer)


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ([WHOLE], b"hello"),
        ([CHUNKED + b"3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n"], b"hello"),
        ([CHUNKED + b"5\r\nhello\r\n0\r\nX-Libra-Instance: i9\r\nA: b\r\n\r\n"], b"hello"),
        ([OK + b"content-length:0\r\n\r\n"], b""),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
        (
            [b"HTTP/1.1 100 Continue\r\n\r\n", 0.02, b"HTTP/1.1 103 Hints\r\n\r\n", WHOLE],
            b"hello",
        ),
    ],
)
async def test_every_framing_is_read_and_the_connection_used_again(http, answer, content):
    async with Script(answer, [WHOLE]) as server:
        status, read = await get(http, server)
        assert (status // 100, read) == (2, content)
        assert await get(http, server) == (200, b"hello")
        assert server.num_connections == 1


async def test_an_answer_that_comes_byte_by_byte_is_the_same(http):
    whole = CHUNKED + b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
    parts = [part for k in range(len(whole)) for part in (whole[k : k + 1], 0)]
    async with Script(parts, [WHOLE]) as server:
        assert await get(http, server) == (200, b"hello world")
        assert await get(http, server) == (200, b"hello")
        assert server.num_connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        [OK + b"\r\nhello", None],
        [b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo", None],
        [OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello"],
        [b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello"],
        [WHOLE + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nmore"],
        [WHOLE + b"more"],
    ],
)
async def test_a_connection_that_is_not_to_be_kept_is_not_used_again(http, answer):
    async with Script(answer, [WHOLE]) as server:
        assert await get(http, server) == (200, b"hello")
        assert await get(http, server) == (200, b"hello")
        assert server.num_connections == 2


async def test_what_comes_when_nobody_asked_closes_the_connection(http):
    async with Script([WHOLE, 0.05, WHOLE], [WHOLE]) as server:
        assert await get(http, server) == (200, b"hello")
        with anyio.fail_after(10):
            while server.num_open:
                await clock.sleep(0.005)
        assert await get(http, server) == (200, b"hello")
        assert server.num_connections == 2


@pytest.mark.case("R-B38")
@pytest.mark.parametrize(
    "answer",
    [
        [OK + b"Content-Length: 9\r\n\r\nhello", None],
        [OK + b"Content-Length: 9\r\n\r\nhello", 0.05, "reset"],
        [CHUNKED + b"5\r\nhello\r\n", None],
        [CHUNKED + b"5\r\nhello\r\nZ\r\n"],
        [OK + b"\r\nhello", 0.05, "reset"],
    ],
)
async def test_what_came_before_the_connection_was_lost_is_handed_out(http, answer):
    async with Script(answer) as server:
        reply = await http.ask(request_to(server))
        assert (reply.status, await reply.next_piece()) == (200, b"hello")
        with pytest.raises(LostError) as lost:
            await reply.next_piece()
        assert not lost.value.is_stale
        assert http.num_busy == 0


@pytest.mark.case("R-B34")
@pytest.mark.parametrize(
    ("answer", "is_stale"), [([None], True), (["reset"], True), ([b"H", 0.05, None], False)]
)
async def test_only_a_used_connection_without_a_byte_of_an_answer_is_stale(http, answer, is_stale):
    async with Script([WHOLE], answer, [WHOLE], [None]) as server:
        await get(http, server)
        with pytest.raises(LostError) as lost:
            await get(http, server)
        assert lost.value.is_stale == is_stale
        assert await get(http, server, is_fresh=True) == (200, b"hello")
        with pytest.raises(LostError) as lost:
            await get(http, server, is_fresh=True)
        assert not lost.value.is_stale


@pytest.mark.parametrize(
    "answer",
    [
        [b"SSH-2.0-OpenSSH_9.2\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"],
        [b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nabc"],
    ],
)
async def test_what_is_no_http_is_an_error_at_once(http, answer):
    async with Script([*answer, 60]) as server:
        with anyio.fail_after(10), pytest.raises(LostError, match="no HTTP"):
            await get(http, server)
    assert http.num_busy == 0


@pytest.mark.parametrize(
    ("begin", "flood"),
    [
        (OK, b"X-Header: many\r\n" * 512),
        (OK + b"X-Long: ", b"x" * 8192),
        (CHUNKED + b"5\r\nhello\r\n0\r\n", b"X-Trailer: many\r\n" * 512),
        (CHUNKED + b"5;", b"x" * 8192),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 512),
    ],
)
async def test_a_head_or_trailer_without_end_is_given_up(http, begin, flood):
    async with Script([begin, *[flood] * 1000]) as server:
        with anyio.fail_after(10), pytest.raises(LostError, match="without any body"):
            await get(http, server)
    assert http.num_busy == 0


async def test_a_body_that_nobody_reads_makes_the_server_wait(http):
    num_bytes, piece = 64 * 2**20, b"x" * 2**16
    head = OK + b"Content-Length: %d\r\n\r\n" % num_bytes
    async with Script([head, *[piece] * (num_bytes // len(piece))], [WHOLE]) as server:
        answer = await http.ask(request_to(server))
        await clock.sleep(0.3)
        assert answer._num_buffered < answer_module.MAX_BUFFERED_BYTES + 2**18
        assert len(await content_of(answer)) == num_bytes
        assert await get(http, server) == (200, b"hello")  # and it goes on reading afterwards
        assert server.num_connections == 1


@pytest.mark.parametrize("num_bytes", [0, 5, 2**20, 5 * 2**20 + 3])
async def test_bodies_of_any_size_arrive_whole(http, num_bytes):
    async with Script([WHOLE], [WHOLE]) as server:
        body = bytes(k % 251 for k in range(num_bytes))
        answer = await http.ask(request_to(server, method="POST", body=body))
        assert await content_of(answer) == b"hello"
        assert server.requests[0].endswith(b"\r\n\r\n" + body)
        await get(http, server)
        assert server.num_connections == 1


async def test_a_refusal_before_all_of_a_large_body_was_sent_is_taken(http):
    too_large = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"
    async with Script([too_large, 60], [WHOLE]) as server:
        server.reads_bodies = False
        with anyio.fail_after(10):
            answer = await http.ask(request_to(server, method="POST", body=b"x" * 2**26))
            assert (answer.status, await content_of(answer)) == (413, b"no")
            # The rest of that body is not to be taken for what comes next.
            assert await get(http, server) == (200, b"hello")
        assert http.num_busy == 0


async def test_a_server_that_closes_in_the_middle_of_a_large_body_is_an_error(http, caplog):
    async with Script([0.05, "reset"]) as server:
        server.reads_bodies = False
        with anyio.fail_after(10), pytest.raises(LostError):
            await http.ask(request_to(server, method="POST", body=b"x" * 2**26))
    assert caplog.records == []


async def test_the_loop_has_its_turn_while_a_large_body_goes_out(http):
    turns = 0

    async def count():
        nonlocal turns
        while True:
            await clock.sleep(0)
            turns += 1

    async with Script([WHOLE]) as server, anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        answer = await http.ask(request_to(server, method="POST", body=b"x" * 2**25))
        await content_of(answer)
        tasks.cancel_scope.cancel()
    assert turns >= 2**25 // 2**18


@pytest.mark.case("R-B14")
@pytest.mark.parametrize("answer", [["end"], [OK + b"Content-Length: 9\r\n\r\nhello", "end"]])
async def test_a_call_that_is_cancelled_or_closed_closes_its_connection(http, answer):
    async with Script(answer) as server:
        with anyio.move_on_after(0.1):
            reply = await http.ask(request_to(server))
            reply.close()
        assert http.num_busy == 0
        with anyio.fail_after(5):
            await server.saw_end.wait()


async def test_idle_connections_are_closed_after_their_time_and_when_the_client_ends():
    async with Script([WHOLE], [WHOLE], [WHOLE]) as server:
        async with HttpClient(idle_s=0.1) as http:
            await get(http, server)
            with anyio.fail_after(5):
                while server.num_open:
                    await clock.sleep(0.005)
            assert await get(http, server) == (200, b"hello")
        async with HttpClient(idle_s=60.0) as http:
            await get(http, server)
        with anyio.fail_after(5):
            while server.num_open:
                await clock.sleep(0.005)
        assert server.num_connections == 3


async def test_who_waits_for_an_answer_when_the_client_ends_is_told():
    async with Script([60]) as server:
        http = await HttpClient(idle_s=5.0).__aenter__()

        async def ask():
            with pytest.raises(LostError, match="the client was closed"):
                await get(http, server)

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                while not server.requests:
                    await clock.sleep(0.005)
                await http.__aexit__(None, None, None)


async def test_a_trailer_is_no_header(http):
    trailer = b"0\r\nX-Libra-Instance: i9\r\n\r\n"
    async with Script([CHUNKED, b"5\r\nhello\r\n", trailer]) as server:
        answer = await http.ask(request_to(server))
        assert await content_of(answer) == b"hello"
        assert answer.header("X-Libra-Instance") is None


async def test_of_two_headers_with_one_name_the_first_counts_and_names_have_no_case(http):
    head = (
        OK
        + b"x-libra-INSTANCE: a\r\nX-Libra-Instance: b\r\nOdd: caf\xe9\r\nContent-Length: 0\r\n\r\n"
    )
    async with Script([head]) as server:
        answer = await http.ask(request_to(server))
        assert answer.header("X-Libra-Instance") == "a"
        assert answer.header("odd") == "caf�"
        assert answer.header("absent") is None


async def test_requests_look_as_they_should():
    request = Request(
        base_url="http://[::1]:8000/name/",
        method="POST",
        path="/v1/completions",
        headers={"X-Request-Id": "é"},
        body=b"{}",
        connect_s=1.0,
    )
    assert head_of(request, origin_of(request.base_url)).decode() == (
        "POST /name/v1/completions HTTP/1.1\r\nHost: [::1]:8000\r\n"
        "X-Request-Id: é\r\nContent-Length: 2\r\n\r\n"
    )


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\nb", "a\0b", "\r"])
async def test_a_value_cannot_add_a_line_to_the_request(http, value):
    async with Script([WHOLE]) as server:
        with pytest.raises(ValueError, match="no line of a request"):
            await http.ask(request_to(server, traceparent=value))
        assert server.num_connections == 0


@pytest.mark.parametrize("url", ["ftp://h:1", "127.0.0.1:8000", "http://user:pw@h:1", "http://:1"])
async def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="no address of a server"):
        origin_of(url)


async def test_ports_follow_from_the_scheme():
    origin = origin_of("https://engine.example/x")
    assert (origin.port, origin.prefix, origin.is_encrypted) == (443, "/x", True)
    assert origin_of("http://engine.example").port == 80


async def test_nobody_there_is_no_connection(http):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        server = Script()
        server.url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(NotConnectedError, match="ConnectionRefusedError"):
            await get(http, server)
    assert http.num_busy == 0


async def test_a_name_is_looked_up(http):
    async with Script([WHOLE]) as server:
        server.url = f"http://localhost:{server.port}"
        assert await get(http, server) == (200, b"hello")
        assert f"Host: localhost:{server.port}".encode() in server.requests[0]
