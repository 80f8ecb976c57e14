"""A load generator that costs little: HTTP/1.1 by hand on keep-alive connections."""

import asyncio
from time import perf_counter


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._pending = bytearray()
        self._answered: asyncio.Future[bytes] | None = None
        self.num_events = 0

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionResetError(f"the server left: {exc}"))

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: ")
        if self._answered is None:
            return
        self._pending += data
        head_end = self._pending.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._pending[:head_end]).lower()
        if self._is_complete(head, head_end) and not self._answered.done():
            self._answered.set_result(head)

    def _is_complete(self, head: bytes, head_end: int) -> bool:
        at = head.find(b"content-length:")
        if at < 0:
            return self._pending.endswith(b"0\r\n\r\n")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0])
        return len(self._pending) >= head_end + 4 + length

    async def ask(self, request: bytes) -> float:
        """Seconds until the whole answer was there. Raises when it is not a 200."""
        self._pending.clear()
        self._answered = asyncio.get_running_loop().create_future()
        began = perf_counter()
        self.transport.write(request)
        head = await self._answered
        if b" 200 " not in head[:16]:
            raise RuntimeError(bytes(self._pending[:300]).decode(errors="replace"))
        return perf_counter() - began

    def start_stream(self, request: bytes) -> None:
        self._answered = None
        self.transport.write(request)


def completion_request(port: int, num_bytes: int, *, is_stream: bool = False) -> bytes:
    """A request whose body has about that many bytes of prompt."""
    more = b', "stream": true' if is_stream else b""
    prompt = b"word " * (num_bytes // 5)
    body = b'{"model": "policy", "prompt": "%b", "max_tokens": 128%b}' % (prompt, more)
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (port, len(body), body)
    )


class Pool:
    """Connections to one port, opened when none is idle."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []

    async def ask(self, request: bytes) -> float:
        connection = self._idle.pop() if self._idle else await self.connect()
        seconds = await connection.ask(request)
        self._idle.append(connection)
        return seconds

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.close()


async def open_loop(port: int, request: bytes, *, rate: float, duration_s: float) -> list[float]:
    """Latencies at a fixed rate, whatever the server does: late answers do not slow the clock."""
    loop, pool = asyncio.get_running_loop(), Pool(port)
    latencies: list[float] = []

    async def one(due: float) -> None:
        await asyncio.sleep(max(0.0, due - loop.time()))
        latencies.append(await pool.ask(request))

    begin = loop.time() + 0.1
    async with asyncio.TaskGroup() as tg:
        for k in range(int(rate * duration_s)):
            tg.create_task(one(begin + k / rate))
    pool.close()
    return sorted(latencies)


async def closed_loop(port: int, request: bytes, *, num_users: int, duration_s: float) -> float:
    """Requests per second that `num_users` get who ask again at once."""
    loop, pool = asyncio.get_running_loop(), Pool(port)
    end, num_done = loop.time() + duration_s, 0

    async def user() -> None:
        nonlocal num_done
        while loop.time() < end:
            await pool.ask(request)
            num_done += 1

    began = loop.time()
    async with asyncio.TaskGroup() as tg:
        for _ in range(num_users):
            tg.create_task(user())
    elapsed = loop.time() - began
    pool.close()
    return num_done / elapsed
