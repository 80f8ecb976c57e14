"""A fake engine for the gateway: streams, chat and misbehaviour that reality has no switch for."""

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Self

import msgspec
from aiohttp import web

from libra import clock

if TYPE_CHECKING:
    from collections.abc import Mapping

CHUNK_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


def event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


class FakeUpstream:
    """One engine on a real socket. Set the switches, then look at what it saw."""

    def __init__(self, name: str = "i0", *, host: str = "127.0.0.1") -> None:
        self.name, self.host, self.port = name, host, 0
        self.idle_close_s = 75.0
        self.num_tokens = 5
        self.token_delay_s = 0.0
        self.is_hanging = False
        self.drops_all = False
        self.hang_after_tokens: int | None = None
        self.reset_after_tokens: int | None = None
        self.error_after_tokens: int | None = None
        self.next_statuses: deque[int] = deque()
        self.refuses_always: int | None = None
        self.retry_after: str | None = None
        self.max_running: int | None = None
        self.message = "by switch"
        self.padding = ""
        self.tells_usage = True
        self.tells_name = True
        self.versions: str | None = None
        self.bodies: list[bytes] = []
        self.headers: list[Mapping[str, str]] = []
        self.num_running = 0
        self.num_served = 0
        self._transports: set[asyncio.Transport] = set()
        self.cut_at: list[float] = []
        """When clients went away in the middle of an answer."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=self.idle_close_s,
            shutdown_timeout=0,
        )
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True)
        await self._site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._runner.cleanup()

    async def die(self) -> None:
        """Vanish like a killed process: no more connections, the open ones reset."""
        await self._site.stop()
        for transport in list(self._transports):
            transport.abort()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        self.headers.append(request.headers)
        if self.drops_all:
            request.transport.abort()
            return web.Response()
        refusal = self._refusal()
        if refusal is not None:
            return refusal
        self.num_running += 1
        self._transports.add(request.transport)
        try:
            if self.is_hanging:
                await asyncio.Event().wait()
            return await self._generate(request)
        except (asyncio.CancelledError, ConnectionResetError):
            self.cut_at.append(clock.now())
            raise
        finally:
            self.num_running -= 1
            self._transports.discard(request.transport)

    def _refusal(self) -> web.Response | None:
        status = self.next_statuses.popleft() if self.next_statuses else self.refuses_always
        if self.max_running is not None and self.num_running >= self.max_running:
            status = 503
        if status is None:
            return None
        headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
        if status in range(300, 400):
            headers["Location"] = "/elsewhere"
        content = {"error": {"message": self.message, "code": status}}
        return web.json_response(content, status=status, headers=headers)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(self.bodies[-1])
        is_chat = request.path.endswith("chat/completions")
        if not asked.get("stream"):
            await clock.sleep(self.num_tokens * self.token_delay_s)
            self.num_served += 1
            return web.json_response(self._whole(is_chat), headers=self._identity())
        response = web.StreamResponse(headers=CHUNK_HEADERS | self._identity())
        response.enable_chunked_encoding()
        await response.prepare(request)
        for k in range(self.num_tokens):
            if await self._is_cut_at(k, request, response):
                return response
            await response.write(event(self._piece(k, is_chat)))
            await clock.sleep(self.token_delay_s)
        if self.tells_usage:
            await response.write(event({"choices": [], "usage": self._usage()}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        self.num_served += 1
        return response

    async def _is_cut_at(self, k: int, request: web.Request, response: web.StreamResponse) -> bool:
        if k == self.hang_after_tokens:
            await asyncio.Event().wait()
        if k == self.error_after_tokens:
            await response.write(event({"error": {"message": self.message, "code": 500}}))
            await response.write(b"data: [DONE]\n\n")
            return True
        if k == self.reset_after_tokens:
            await clock.sleep(0.05)  # let what was written leave before the cut
            request.transport.abort()
            return True
        return False

    def _identity(self) -> dict[str, str]:
        name = {"X-Libra-Instance": self.name} if self.tells_name else {}
        return name if self.versions is None else name | {"X-Libra-Policy-Versions": self.versions}

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": 3,
            "completion_tokens": self.num_tokens,
            "total_tokens": 3 + self.num_tokens,
        }

    def _piece(self, k: int, is_chat: bool) -> dict:
        text = {"delta": {"content": f"t{k} "}} if is_chat else {"text": f"t{k} {self.padding}"}
        choice = {"index": 0, "finish_reason": None, "token_ids": [k], **text}
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        return {"id": "c-1", "object": kind, "created": 1, "model": "policy", "choices": [choice]}

    def _whole(self, is_chat: bool) -> dict:
        text = "".join(f"t{k} " for k in range(self.num_tokens))
        said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": list(range(self.num_tokens)),
            "prompt_token_ids": [1, 2, 3],
            "logprobs": None,
            **said,
        }
        answer = {
            "id": "c-1",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 1,
            "model": "policy",
            "choices": [choice],
        }
        return answer | ({"usage": self._usage()} if self.tells_usage else {})
