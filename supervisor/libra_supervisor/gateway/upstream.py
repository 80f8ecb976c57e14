"""One request to one engine on behalf of a client, limited phase by phase, never sent twice.

The exception: a pooled connection that proves closed within STALE_WITHIN_S and before any byte of
an answer came. Such a request never reached the engine, and goes out once more on a fresh
connection. One that is lost later may have been worked on, and is not repeated.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from math import inf
from types import TracebackType
from typing import Self

import anyio
import msgspec

from libra import clock
from libra.errors import PeerError
from libra.ids import InstanceId
from libra.wire.instance import INSTANCE_HEADER
from libra_supervisor.http.answer import Answer
from libra_supervisor.http.client import HttpClient
from libra_supervisor.http.errors import LostError, NotConnectedError
from libra_supervisor.http.request import Request

POOL_IDLE_S = 3.0
"""Below the 5 s after which uvicorn under vLLM closes an idle connection."""

STALE_WITHIN_S = 1.0
"""A closed connection answers a request with a reset after one round trip."""


class PhaseLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per phase; None waits for ever. The whole has no limit: a long answer is no fault."""

    connect_s: float = 5.0
    first_byte_s: float | None = None
    """Of a whole answer the first byte comes with the last token, so it has no limit. A server
    that hangs is found by its lack of progress and ended, which ends its calls."""

    idle_s: float | None = 300.0
    """Between two pieces of an answer; longer than a weight reload that freezes it."""


class UnreachableError(PeerError):
    """The connection could not be made: the engine has not seen the request."""


class Engine(msgspec.Struct, frozen=True):
    """Where an instance answers."""

    instance_id: InstanceId
    url: str
    """Like `http://127.0.0.1:8000` or `http://[::1]:8000`, without a trailing slash."""


class Upstream:
    """Connections to all engines. An asynchronous context manager, on asyncio."""

    def __init__(self, limits: PhaseLimits) -> None:
        self._limits = limits

    async def __aenter__(self) -> Self:
        self._http = await HttpClient(idle_s=POOL_IDLE_S).__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.__aexit__(exc_type, exc, traceback)

    @asynccontextmanager
    async def ask(
        self,
        engine: Engine,
        path: str,
        *,
        body: bytes,
        headers: Mapping[str, str],
        patience: AbstractContextManager[object],
    ) -> AsyncGenerator[Answer]:
        """The engine's answer, its body still to be read. Closed, and so aborted, with the block.

        The beginning of the answer is awaited within `patience`, which may end the wait. Raises
        UnreachableError, or PeerError when no answer began.
        """
        with patience:
            answer = await self._send(engine, path, body=body, headers=headers)
        try:
            _check_identity(engine, answer)
            yield answer
        finally:
            answer.close()  # before its end: the connection is cut, so the engine stops

    async def pour(
        self,
        engine: Engine,
        answer: Answer,
        sink: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Hand the body to `sink` piece by piece as it comes.

        Raises PeerError when the engine breaks off or idles too long; what `sink` raises passes.
        The time that `sink` takes is not the engine's.
        """
        idle_s = inf if self._limits.idle_s is None else self._limits.idle_s
        with anyio.move_on_after(None) as scope:
            while True:
                if answer.is_waited_for:
                    scope.deadline = clock.now() + idle_s
                piece = await _next_piece(engine, answer)
                scope.deadline = inf
                if not piece:
                    return
                await sink(piece)
        raise PeerError(f"{engine.instance_id} was silent for {idle_s} s within an answer")

    async def _send(
        self, engine: Engine, path: str, *, body: bytes, headers: Mapping[str, str]
    ) -> Answer:
        request = Request(
            base_url=engine.url,
            method="POST",
            path=path,
            headers=headers,
            body=body,
            connect_s=self._limits.connect_s,
        )
        began = clock.now()
        try:
            return await self._ask(engine, request, is_fresh=False)
        except LostError as exc:
            if not exc.is_stale or clock.now() > began + STALE_WITHIN_S:
                raise PeerError(f"{engine.instance_id} did not answer: {exc!r}") from exc
        try:
            return await self._ask(engine, request, is_fresh=True)
        except LostError as exc:
            raise PeerError(f"{engine.instance_id} did not answer: {exc!r}") from exc

    async def _ask(self, engine: Engine, request: Request, *, is_fresh: bool) -> Answer:
        limit_s = self._limits.first_byte_s
        try:
            with nullcontext() if limit_s is None else anyio.fail_after(limit_s):
                return await self._http.ask(request, is_fresh=is_fresh)
        except NotConnectedError as exc:
            raise UnreachableError(f"{engine.instance_id} at {engine.url}: {exc}") from exc
        except TimeoutError as exc:
            raise PeerError(f"{engine.instance_id} was silent for {limit_s} s") from exc


async def _next_piece(engine: Engine, answer: Answer) -> bytes:
    try:
        return await answer.next_piece()
    except LostError as exc:
        raise PeerError(f"{engine.instance_id} broke off its answer: {exc!r}") from exc


def _check_identity(engine: Engine, answer: Answer) -> None:
    """Refuse a stranger on the port. Engines that were not started by us tell no name."""
    answered = answer.header(INSTANCE_HEADER)
    if answered is not None and answered != engine.instance_id:
        raise PeerError(f"{engine.url} is {answered} and not {engine.instance_id}")
