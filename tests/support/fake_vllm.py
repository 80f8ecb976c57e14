"""A fake vLLM server as `libra.serving.launch` starts them, on real sockets, with fault switches.

    async with FakeVllm("vllm-0", token="secret") as server:
        client = InstanceClient("vllm-0", server.url, token="secret")

Answers are deterministic: `answer(prompt, body, version)` gives the token ids (default:
`max_tokens` ids from prompt and version), one every `token_delay_s`. While it is paused, tokens
wait. Counters are those of vLLM's /metrics. `calls` logs every request as (method, path).

Switches, all plain attributes, changeable at any time (a name in `hang` is a path or a prefix):

* `hang`: set of paths that accept and never answer ("/v1/completions", "/health", "/metrics",
  "/libra/reload", "/libra/state"); emptying it does not free those already hanging.
* `next_statuses`: statuses for the next completions, one each (429, 500, 503, 400, ...), with
  `retry_after_s` as a header where set.
* `reset_after_bytes`: completions send that many bytes of their answer, then the connection resets.
* `drop_next`: that many completions are closed without a byte.
* `health_status`: what /health answers (503: the engine is dead).
* `freeze_tokens`: running requests make no progress and /metrics stays as it is.
* `metrics_text`: replaces the /metrics page; `freeze_metrics` repeats the last one.
* `max_running`: more completions than that are answered 503 busy.
* `start_delay_s`: after start and restart, connections are accepted but nothing is answered.
* `next_reloads`: a ReloadFault for each of the next reloads; "" is a good one.
* `reload_s`: how long a load takes.
* `idle_close_s`: idle connections are closed after that long (constructor only).
* `fails`: paths of /sleep and /wake_up that answer 500.
* `restart()`: a new process at the same port: new incarnation, base version, counters at 0.
"""

import asyncio
import itertools
import zlib
from collections import deque
from collections.abc import Callable
from typing import Literal, Self

import msgspec
from aiohttp import web

from libra import clock
from libra.wire.instance import (
    INCARNATION_HEADER,
    INSTANCE_HEADER,
    SPANS_FIELD,
    VERSIONS_HEADER,
    WEIGHTS_UNKNOWN,
    InstanceState,
    OpenRequests,
    ReloadAck,
    ReloadRequest,
)

ReloadFault = Literal[
    "",
    "refused",  # ACK with an error, the old version goes on
    "load_failed",  # ACK with an error, version unknown, completions refused
    "hang",  # loads, never answers
    "reset",  # loads, closes the connection
    "no_load",  # answers nothing and loads nothing
    "wrong_hash",
    "wrong_version",
    "wrong_nonce",
    "wrong_probe",  # probe logprobs of other weights
    "nan_probe",
    "status_500",
]

VOCABULARY = 500
Answer = Callable[[list[int], dict, int], list[int]]


def default_answer(prompt: list[int], body: dict, version: int) -> list[int]:
    seed = zlib.crc32(repr((prompt, version, body.get("seed"))).encode())
    return [(seed + k * 7919) % VOCABULARY for k in range(body["max_tokens"])]


def default_probe(token_ids: tuple[int, ...], version: int) -> tuple[float, ...]:
    """The probe logprobs a FakeVllm reports for a version."""
    return tuple(
        -1.0 - (zlib.crc32(repr((token, version)).encode()) % 1000) / 1000
        for token in token_ids[1:]
    )


class FakeVllm:
    def __init__(
        self,
        instance_id: str = "vllm-0",
        *,
        token: str = "secret",  # noqa: S107
        run_id: str = "run-1",
        answer: Answer = default_answer,
        host: str = "127.0.0.1",
        idle_close_s: float = 75.0,
    ) -> None:
        self.instance_id, self.token, self.run_id, self.answer = instance_id, token, run_id, answer
        self.host, self.idle_close_s = host, idle_close_s
        self.hang: set[str] = set()
        self.fails: set[str] = set()
        self.next_statuses: deque[int] = deque()
        self.retry_after_s: int | None = None
        self.reset_after_bytes: int | None = None
        self.drop_next = 0
        self.health_status = 200
        self.freeze_tokens = False
        self.metrics_text: str | None = None
        self.second_engine_waits: int | None = None
        self.freeze_metrics = False
        self.max_running: int | None = None
        self.start_delay_s = 0.0
        self.next_reloads: deque[ReloadFault] = deque()
        self.reload_s = 0.0
        self.token_delay_s = 0.0
        self.kv_use_fraction = 0.0
        self.kv_capacity_tokens = 1536
        self.calls: list[tuple[str, str]] = []
        self.completion_bodies: list[dict] = []
        self.num_starts = 0
        self._last_metrics = ""
        self._begin()

    def _begin(self) -> None:
        self.num_starts += 1
        self.incarnation = f"{self.instance_id}#{self.num_starts}"
        self.version: int | None = 0
        self.manifest_hash: str | None = None
        self.is_paused = self.is_asleep = False
        self.num_running = 0
        self.num_tokens_of: dict[str, int] = {}
        self.num_aborted = 0
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self.num_preemptions_total = 0
        self.num_prefix_resets = 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._reload_lock = asyncio.Lock()

    # Life

    async def __aenter__(self) -> Self:
        self.port = 0
        await self._listen()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def _listen(self) -> None:
        app = web.Application(client_max_size=2**28, middlewares=[self._middleware])
        app.router.add_route("*", "/{path:.*}", self._dispatch)
        app.on_response_prepare.append(self._stamp)
        self._runner = web.AppRunner(
            app, keepalive_timeout=self.idle_close_s, handler_cancellation=True, shutdown_timeout=0
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._ready_at = asyncio.get_running_loop().time() + self.start_delay_s

    async def stop(self) -> None:
        """End the process: every connection is cut."""
        await self._runner.cleanup()

    async def restart(self) -> None:
        await self.stop()
        self._begin()
        await self._listen()

    # HTTP

    async def _stamp(self, _request: web.Request, response: web.StreamResponse) -> None:
        response.headers[INSTANCE_HEADER] = self.instance_id
        response.headers[INCARNATION_HEADER] = self.incarnation

    @web.middleware
    async def _middleware(self, request: web.Request, handler) -> web.StreamResponse:
        self.calls.append((request.method, request.path))
        await clock.sleep(max(0.0, self._ready_at - asyncio.get_running_loop().time()))
        if any(request.path.startswith(path) for path in self.hang):
            await asyncio.Event().wait()
        return await handler(request)

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        match request.method, request.path:
            case "GET", "/health":
                return web.Response(status=self.health_status)
            case "GET", "/metrics":
                return web.Response(text=self._metrics())
            case "GET", "/libra/state":
                return self._json(self.state())
            case "GET", "/libra/requests":
                return self._open_requests(request)
            case "POST", "/libra/reload":
                return await self._reload(request)
            case "POST", "/sleep" | "/wake_up":
                return self._give_or_take_memory(request)
            case "POST", "/v1/completions":
                return await self._complete(request)
            case _:
                return web.json_response({"detail": "Not Found"}, status=404)

    def _json(self, content: object) -> web.Response:
        return web.Response(body=msgspec.json.encode(content), content_type="application/json")

    def state(self) -> InstanceState:
        return InstanceState(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            run_id=self.run_id,
            policy_version=self.version,
            is_paused=self.is_paused,
            manifest_hash=self.manifest_hash,
            is_asleep=self.is_asleep,
        )

    def _give_or_take_memory(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "the token is wrong"}, status=401)
        self.version = self.manifest_hash = None
        if request.path in self.fails:
            return web.json_response({"error": "out of memory"}, status=500)
        self.is_asleep = request.path == "/sleep"
        self._pause(self.is_asleep)
        return web.json_response({"status": "sleeping" if self.is_asleep else "awake"})

    def _open_requests(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "the token is wrong"}, status=401)
        return self._json(OpenRequests(num_tokens=self.num_tokens_of))

    # Completions

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.completion_bodies.append(body)
        if self.drop_next:
            self.drop_next -= 1
            return self._cut(request)
        refusal = self._refusal()
        if refusal is not None:
            return refusal
        self.num_running += 1
        name = request.headers.get("X-Request-Id", "")
        try:
            token_ids, spans = await self._generate(body, name)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1
            self.num_tokens_of.pop(name, None)
        content = self._answer_body(body, token_ids, spans)
        versions = ",".join(str(v) for v in dict.fromkeys(span[0] for span in spans))
        response = web.Response(
            body=content, content_type="application/json", headers={VERSIONS_HEADER: versions}
        )
        if self.reset_after_bytes is None:
            return response
        partial = web.StreamResponse(headers={"Content-Type": "application/json"})
        partial.content_length = len(content)
        await partial.prepare(request)
        await partial.write(content[: self.reset_after_bytes])
        return self._cut(request, partial)

    def _refusal(self) -> web.Response | None:
        if self.next_statuses:
            status = self.next_statuses.popleft()
            headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
            content = {"error": {"message": f"status {status} by switch", "code": status}}
            return web.json_response(content, status=status, headers=headers)
        if self.version is None:
            message = f"{WEIGHTS_UNKNOWN}: a reload failed"
            return web.json_response({"error": {"message": message}}, status=503)
        if self.max_running is not None and self.num_running >= self.max_running:
            message = "The engine is currently busy. Please try again later."
            return web.json_response({"error": {"message": message}}, status=503)
        return None

    def _cut(
        self, request: web.Request, response: web.StreamResponse | None = None
    ) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return response or web.Response()

    async def _generate(self, body: dict, name: str) -> tuple[list[int], list[list[int]]]:
        """Token ids and version spans; a reload in between changes both from there on."""
        prompt = list(body["prompt"])
        self.num_tokens_of[name] = 0
        self.prompt_tokens_total += len(prompt)
        await self._resumed.wait()
        token_ids: list[int] = []
        spans: list[list[int]] = []
        for k in itertools.count():
            await self._resumed.wait()
            while self.freeze_tokens:
                await clock.sleep(0.01)
            assert self.version is not None
            whole = self.answer(prompt, body, self.version)
            if k >= len(whole):
                return token_ids, spans
            if not spans or spans[-1][0] != self.version:
                spans.append([self.version, k, k])
            token_ids.append(whole[k])
            spans[-1][2] = k + 1
            self.generation_tokens_total += 1
            self.num_tokens_of[name] = k + 1
            if self.token_delay_s:
                await clock.sleep(self.token_delay_s)
        raise AssertionError

    def _answer_body(self, body: dict, token_ids: list[int], spans: list[list[int]]) -> bytes:
        is_cut = len(token_ids) >= body["max_tokens"]
        choice = {
            "index": 0,
            "text": " ".join(map(str, token_ids)),
            "token_ids": token_ids,
            "logprobs": {"token_logprobs": [-1.0 - (t % 10) / 10 for t in token_ids]},
            "finish_reason": "length" if is_cut else "stop",
            SPANS_FIELD: spans,
        }
        num_prompt = len(body["prompt"])
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(token_ids),
            "total_tokens": num_prompt + len(token_ids),
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        return msgspec.json.encode({"id": "cmpl-1", "choices": [choice], "usage": usage})

    # Reload

    def _pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        (self._resumed.clear if is_paused else self._resumed.set)()

    async def _reload(self, http_request: web.Request) -> web.StreamResponse:
        if http_request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "the token is wrong"}, status=401)
        request = msgspec.json.decode(await http_request.read(), type=ReloadRequest)
        fault: ReloadFault = self.next_reloads.popleft() if self.next_reloads else ""
        if fault == "status_500":
            return web.json_response({"error": "a bug"}, status=500)
        if fault == "no_load":
            await asyncio.Event().wait()
        arrived_at = asyncio.get_running_loop().time()
        async with self._reload_lock:
            locked_at = asyncio.get_running_loop().time()
            error = self._reason_to_refuse(request) or ("by switch" if fault == "refused" else None)
            if error is None:
                error = await self._load(request, fault)
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "reset":
            return self._cut(http_request)
        ended_at = asyncio.get_running_loop().time()
        times = (locked_at - arrived_at, ended_at - arrived_at)
        return self._json(self._ack(request, fault, error, times))

    def _reason_to_refuse(self, request: ReloadRequest) -> str | None:
        if request.run_id != self.run_id:
            return f"the request is of run {request.run_id}"
        if self.is_asleep:
            return "the engine sleeps"
        loaded = -1 if request.force or self.version is None else self.version
        if request.policy_version <= loaded:
            return f"v{request.policy_version} is not newer than v{loaded}"
        return None

    async def _load(self, request: ReloadRequest, fault: ReloadFault) -> str | None:
        self._pause(True)
        await clock.sleep(self.reload_s)
        if fault == "load_failed":
            self.version = self.manifest_hash = None
            return "the load failed by switch"
        self.version, self.manifest_hash = request.policy_version, request.manifest_hash
        self.num_prefix_resets += 1
        self._pause(False)
        return None

    def _ack(
        self,
        request: ReloadRequest,
        fault: ReloadFault,
        error: str | None,
        times: tuple[float, float],
    ) -> ReloadAck:
        lock_wait_s, total_s = times
        probed_version = request.policy_version + (fault == "wrong_probe")
        ack = ReloadAck(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            run_id=request.run_id,
            nonce=request.nonce,
            policy_version=request.policy_version if error is None else self.version,
            method="inplace",
            strategy=request.strategy,
            lock_wait_s=lock_wait_s,
            process_stop_s=0.0,
            model_load_s=max(0.0, total_s - lock_wait_s),
            total_s=total_s,
            manifest_hash=request.manifest_hash,
            verified=("manifest", "files", "load", "probe") if error is None else (),
            probe_logprobs=() if error else default_probe(request.probe_token_ids, probed_version),
            error=error,
        )
        match fault:
            case "wrong_hash":
                return msgspec.structs.replace(ack, manifest_hash="other")
            case "wrong_version":
                return msgspec.structs.replace(ack, policy_version=request.policy_version - 1)
            case "wrong_nonce":
                return msgspec.structs.replace(ack, nonce="other")
            case "nan_probe":
                return msgspec.structs.replace(ack, probe_logprobs=(float("nan"),))
            case _:
                return ack

    # Metrics

    def _metrics(self) -> str:
        if self.metrics_text is not None:
            return self.metrics_text
        if not (self.freeze_metrics or self.freeze_tokens) or not self._last_metrics:
            self._last_metrics = self._metrics_page()
        return self._last_metrics

    def _metrics_page(self) -> str:
        labels = '{engine="0",model_name="policy"}'
        values = {
            "vllm:num_requests_running": self.num_running,
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": self.kv_use_fraction,
            "vllm:num_preemptions_total": self.num_preemptions_total,
            "vllm:prompt_tokens_total": self.prompt_tokens_total,
            "vllm:generation_tokens_total": self.generation_tokens_total,
            "vllm:prefix_cache_queries_total": self.prompt_tokens_total,
            "vllm:prefix_cache_hits_total": 0,
        }
        lines = [f"{name}{labels} {float(value)}" for name, value in values.items()]
        if self.second_engine_waits is not None:
            lines.append(f'vllm:num_requests_waiting{{engine="1"}} {self.second_engine_waits}')
        info = f'engine="0",block_size="32",kv_cache_size_tokens="{self.kv_capacity_tokens}"'
        return "\n".join([*lines, f"vllm:cache_config_info{{{info}}} 1.0", ""])
