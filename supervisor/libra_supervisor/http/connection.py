"""One HTTP/1.1 connection that carries one request at a time.

httptools parses (llhttp, as under uvicorn, strict); here is what lies around it: whose answer the
bytes are, when the connection is free again, and what a server may not do with our memory.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from libra_supervisor.http.answer import Answer
from libra_supervisor.http.errors import LostError

MAX_BYTES_WITHOUT_BODY = 2**17
"""Of heads, trailers and the frames of chunks, without a byte of body in between."""

LARGE_BODY_BYTES = 2**20
PIECE_BYTES = 2**18
"""From LARGE_BODY_BYTES on a request's body is written in pieces of this size, so that the event
loop gets its turn in between."""

INTERIM = range(100, 200)


class Connection(asyncio.Protocol):
    """Becomes free by itself when a whole answer has come and the server keeps it open."""

    def __init__(
        self,
        on_free: Callable[["Connection"], None],
        on_closed: Callable[["Connection"], None],
    ) -> None:
        self._on_free = on_free
        self._on_closed = on_closed
        self._answer: Answer | None = None
        self._status = 0
        self._headers: dict[str, str] = {}
        self.has_heard = False
        """Anything, since the last request."""

        self._is_sent = False
        self._is_full = False
        self._is_held = False
        self._num_bytes_without_body = 0
        self._parser = httptools.HttpResponseParser(self)

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    @property
    def is_busy(self) -> bool:
        return self._answer is not None

    async def ask(self, head: bytes, body: bytes) -> Answer:
        """Send a request; return when the head of its answer is there.

        Raises LostError. If this ends in any other way than by returning, the connection is cut.
        """
        answer = self._answer = Answer(self)
        self._is_sent = self.has_heard = False
        self._num_bytes_without_body = 0
        try:
            await self._send(head, body, answer)
            await answer.until_head()
        except BaseException:
            self.cut()
            raise
        return answer

    def cut(self) -> None:
        """Close at once, whatever is still on its way. May be called again."""
        self._answer = None
        self._transport.abort()

    def lose(self, why: str) -> None:
        """Close at once, and say so to whoever waits for an answer."""
        answer = self._answer
        self.cut()
        if answer is not None:
            answer.on_lost(LostError(why))

    def hold(self) -> None:
        if not self._is_held and self.is_open:
            self._is_held = True
            self._transport.pause_reading()

    def go_on(self) -> None:
        if self._is_held and self.is_open:
            self._is_held = False
            self._transport.resume_reading()

    async def _send(self, head: bytes, body: bytes, answer: Answer) -> None:
        if len(body) < LARGE_BODY_BYTES:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head)
            rest = memoryview(body)
            while rest and not answer.has_head:  # who answers early does not want the rest
                self._transport.write(rest[:PIECE_BYTES])
                rest = rest[PIECE_BYTES:]
                await answer.until_head(or_until=lambda: not self._is_full)
            if rest:
                return
        self._is_sent = True

    # What the event loop tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.has_heard = True
        self._num_bytes_without_body += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self.lose(f"the answer is no HTTP: {exc!r}")
        if self._num_bytes_without_body > MAX_BYTES_WITHOUT_BODY:
            self.lose(f"over {MAX_BYTES_WITHOUT_BODY} bytes came without any body")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and exc is None and self._ends_with_connection():
            self._answer.on_end()
            self._answer = None
        self.lose(f"the connection was closed: {exc!r}" if exc else "the connection was closed")
        self._on_closed(self)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._answer is not None:
            self._answer.wake()

    # What the parser tells.

    def on_message_begin(self) -> None:
        self._headers = {}
        if self._answer is None:
            self.cut()  # nobody asked

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is not None and not self._answer.has_head:  # else a trailer
            key = name.decode("latin-1").lower()
            self._headers.setdefault(key, value.decode(errors="replace"))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._answer is not None and self._status not in INTERIM:
            self._answer.headers = self._headers
            self._answer.on_head(self._status)

    def on_body(self, piece: bytes) -> None:
        self._num_bytes_without_body = 0
        if self._answer is not None:
            self._answer.on_piece(piece)

    def on_message_complete(self) -> None:
        if self._answer is None or self._status in INTERIM:
            return
        answer, self._answer = self._answer, None
        answer.on_end()
        if self._is_sent and self._parser.should_keep_alive() and self.is_open:
            self.go_on()
            self._on_free(self)
        else:
            self.cut()

    def _ends_with_connection(self) -> bool:
        """Whether the answer's end is told by the connection's and by nothing else."""
        answer = self._answer
        return (
            answer is not None
            and answer.has_head
            and "content-length" not in answer.headers
            and "transfer-encoding" not in answer.headers
        )
