"""A fake of vLLM's AsyncLLM and of its completions app, in virtual time.

Every output token says which weights made it: `token = 1000 * weights + position`. So whoever
reads an answer can compare what is stamped on it with what is true.

`run()` steps the engine every `step_s`; start it in a task group. `load_error` fails the next
load with unknown weights, `probe_error` makes the next probe's logprobs NaN, `transfer_outcome` is
what the next part of a transfer says, `receive_error` fails its data, `calls` logs.
"""

import math
from types import SimpleNamespace

import anyio
import msgspec

from libra import clock
from libra.errors import RefusedError
from libra.serving.plugin import COUNT_TOKENS
from libra.serving.worker import JOIN_TRANSFER, RECEIVE_WEIGHTS, REFRESH_TIED_HEADS
from libra.transfer.outcome import TransferOutcome

TOKEN_RADIX = 1000


class FakeQueue:
    def __init__(self, request_id):
        self.request_id = request_id
        self.send, self.receive = anyio.create_memory_object_stream(math.inf)


class FakeRequest:
    def __init__(self, request_id, index, params, queue, prompt):
        self.request_id, self.index, self.params, self.queue = request_id, index, params, queue
        self.prompt = prompt
        self.token_ids = []

    @property
    def num_output_tokens(self):
        return len(self.token_ids)


def sampling(*, max_tokens, n=1, is_stream=False, prompt_logprobs=None, stop=(), extra_args=None):
    kind = SimpleNamespace(name="DELTA" if is_stream else "FINAL_ONLY")
    return SimpleNamespace(
        max_tokens=max_tokens,
        n=n,
        output_kind=kind,
        prompt_logprobs=prompt_logprobs,
        stop=stop,
        extra_args=extra_args,
        detokenize=True,
    )


def probe_logprobs(token_ids, weights):
    return tuple(-1.0 - weights - token / 100 for token in token_ids[1:])


class FakeAsyncLLM:
    def __init__(self, base_directory, *, weights=0, step_s=0.01):
        self.model_config = SimpleNamespace(
            model=str(base_directory),
            max_model_len=64,
            hf_text_config=SimpleNamespace(tie_word_embeddings=False, vocab_size=100),
        )
        self.engine_core = SimpleNamespace(call_utility_async=self._utility)
        self.weights, self.step_s = weights, step_s
        self.requests: dict[str, FakeRequest] = {}
        self.pause_mode = None
        self.load_error = None
        self.transfer_outcome = TransferOutcome(checksum="sum")
        self.receive_error = ""
        self.probe_error = False
        self.load_s = 0.5
        self.add_s = 0.0
        self.calls = []
        self._num_added = 0
        self._is_stepping = False

    # The loop

    async def run(self):
        while True:
            await clock.sleep(self.step_s)
            if self.pause_mode not in ("keep", "abort"):
                self._step()

    def _step(self):
        assert self.weights is not None or not self.requests, "a step on broken weights"
        for request in list(self.requests.values()):
            request.token_ids.append(TOKEN_RADIX * self.weights + request.num_output_tokens)
            is_done = request.num_output_tokens >= request.params.max_tokens
            self._put(request, "length" if is_done else None)

    def _put(self, request, finish_reason):
        if finish_reason is not None:
            del self.requests[request.request_id]
        is_stream = request.params.output_kind.name == "DELTA"
        if is_stream:
            token_ids = [] if finish_reason == "abort" else request.token_ids[-1:]
        else:
            token_ids = list(request.token_ids)
        if is_stream or finish_reason is not None:
            output = SimpleNamespace(
                index=request.index,
                token_ids=token_ids,
                finish_reason=finish_reason,
                has_text=request.params.detokenize,
            )
            request.queue.send.send_nowait((output, self._prompt_logprobs(request)))

    def _prompt_logprobs(self, request):
        if request.params.prompt_logprobs is None:
            return None
        values = probe_logprobs(request.prompt, self.weights)
        if self.probe_error:
            values = [math.nan for _ in values]
        entries = [
            {token: SimpleNamespace(logprob=value)}
            for token, value in zip(request.prompt[1:], values, strict=True)
        ]
        return [None, *entries]

    # AsyncLLM's methods

    async def add_request(self, request_id, prompt, params, **_how):
        await clock.sleep(self.add_s)
        self._num_added += 1
        internal = f"{request_id}-{self._num_added:08x}"
        queue = FakeQueue(internal)
        for index in range(params.n):
            child = internal if params.n == 1 else f"{index}_{internal}"
            ids = prompt["prompt_token_ids"]
            self.requests[child] = FakeRequest(child, index, params, queue, ids)
        return queue

    async def generate(self, prompt, params, request_id, **how):
        queue = await self.add_request(request_id, prompt, params, **how)
        with queue.send, queue.receive:
            async for output in self._outputs(queue, params):
                yield output

    async def _outputs(self, queue, params):
        finished, whole = 0, []
        while finished < params.n:
            output, logprobs = await queue.receive.receive()
            finished += output.finish_reason is not None
            whole.append(output)
            if params.output_kind.name == "DELTA":
                yield SimpleNamespace(outputs=[output], prompt_logprobs=logprobs)
        if params.output_kind.name != "DELTA":
            whole.sort(key=lambda output: output.index)
            yield SimpleNamespace(outputs=whole, prompt_logprobs=logprobs)

    async def is_paused(self):
        return self.pause_mode is not None

    async def pause_generation(self, *, mode, clear_cache):
        self.calls.append(("pause", mode, clear_cache))
        self.pause_mode = mode
        if mode == "abort":
            for request in list(self.requests.values()):
                self._put(request, "abort")
        while mode == "wait" and self.requests:
            await clock.sleep(self.step_s)
        if mode == "wait":
            self.pause_mode = "keep"

    async def resume_generation(self):
        self.calls.append(("resume",))
        self.pause_mode = None

    async def collective_rpc(self, method, *, kwargs=None):
        if method == REFRESH_TIED_HEADS:
            self.calls.append((method,))
            return None
        if method == JOIN_TRANSFER:
            self.calls.append((method, kwargs["rank_offset"]))
            return [self._outcome()]
        if method == RECEIVE_WEIGHTS:
            return await self._receive(kwargs["nonce"])
        self.calls.append((method, kwargs["weights_path"]))
        assert self.pause_mode == "keep" or not self.requests, "loaded under running requests"
        self.weights = None
        await clock.sleep(self.load_s)
        if self.load_error is not None:
            error, self.load_error = self.load_error, None
            raise error
        self.weights = int(kwargs["weights_path"].rpartition("v")[2])
        return None

    async def _receive(self, nonce):
        """The nonce says which version comes: v2-..."""
        self.calls.append((RECEIVE_WEIGHTS,))
        assert self.pause_mode == "keep" or not self.requests, "loaded under running requests"
        self.weights = None
        await clock.sleep(self.load_s)
        outcome = self._outcome()
        if self.receive_error:
            outcome = TransferOutcome(error=self.receive_error).as_builtins()
            self.receive_error = ""
        if not outcome["error"]:
            self.weights = int(nonce[1:].partition("-")[0])
        return [outcome]

    def _outcome(self):
        outcome, self.transfer_outcome = self.transfer_outcome, TransferOutcome(checksum="sum")
        return outcome.as_builtins()

    async def reset_mm_cache(self):
        self.calls.append(("reset_mm_cache",))

    async def reset_prefix_cache(self, *, reset_running_requests):
        self.calls.append(("reset_prefix_cache", reset_running_requests))
        return True

    async def _utility(self, method, *arguments):
        if method == COUNT_TOKENS:
            assert self.weights is not None, "asked while it loads, when a real engine would wait"
        else:
            self.calls.append((method, *arguments))
            assert self.pause_mode is not None
        return {name: request.num_output_tokens for name, request in self.requests.items()}


class FakeCompletionsApp:
    """vLLM's routes, as far as the middleware changes what passes through them."""

    def __init__(self, engine):
        self.state = SimpleNamespace(engine_client=engine)
        self.seen = []
        self.statuses = {}
        """Of other routes than those for completions, where it is not 200."""

        self._num_requests = 0

    async def __call__(self, scope, receive, send):
        self.seen.append((scope["method"], scope["path"]))
        if scope["path"] not in ("/v1/completions", "/v1/chat/completions"):
            status = self.statuses.get(scope["path"], 200)
            await self._answer(send, status, {"path": scope["path"]})
            return
        body = msgspec.json.decode((await receive())["body"])
        if body.get("is_bad"):
            await self._answer(send, 400, {"error": {"message": "bad"}})
            return
        if body.get("client_leaves"):
            # What vLLM sends to a client that has left before its answer was there.
            await self._answer(send, 200, None)
            return
        self._num_requests += 1
        if body.get("stream"):
            await self._stream(body, send)
            return
        try:
            await self._whole(body, send)
        except RefusedError as error:
            await self._answer(send, 500, {"error": {"message": repr(error)}})

    def _generators(self, body, scope_id):
        params = sampling(
            max_tokens=body["max_tokens"],
            n=body.get("n", 1),
            is_stream=body.get("stream", False),
            stop=body.get("stop", ()),
            extra_args=body.get("vllm_xargs"),
        )
        generate = self.state.engine_client.generate
        for k, prompt in enumerate(body["prompts"]):
            name = f"cmpl-{scope_id}-{k}"
            yield generate({"prompt_token_ids": prompt}, params, name)

    async def _whole(self, body, send):
        choices = []
        for outputs in self._generators(body, self._num_requests):
            async for output in outputs:
                for part in output.outputs:
                    text = 'a "finish_reason":"x" b' if part.has_text else ""
                    choice = {"index": len(choices), "text": text}
                    choice |= {"token_ids": part.token_ids, "finish_reason": part.finish_reason}
                    choices.append(choice)
        await self._answer(send, 200, {"id": "cmpl", "choices": choices, "usage": {"n": 1}})

    async def _stream(self, body, send):
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._choices(body, send)
        except RefusedError as error:  # vLLM turns every error into an event
            await self._event(send, msgspec.json.encode({"error": {"message": repr(error)}}))
        await self._event(send, b"[DONE]", is_last=True)

    async def _choices(self, body, send):
        for k, outputs in enumerate(self._generators(body, self._num_requests)):
            async for output in outputs:
                for part in output.outputs:
                    index = k * body.get("n", 1) + part.index
                    choice = {"index": index, "text": 'a "finish_reason":"x" b'}
                    choice |= {"token_ids": part.token_ids, "finish_reason": part.finish_reason}
                    await self._event(send, msgspec.json.encode({"choices": [choice]}))

    async def _event(self, send, data, *, is_last=False):
        body = b"data: " + data + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def _answer(self, send, status, content):
        body = msgspec.json.encode(content)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Answer:
    """What an ASGI application sent."""

    def __init__(self):
        self.status, self.headers, self.body = None, {}, b""

    async def send(self, message):
        if message["type"] == "http.response.start":
            assert self.status is None, "answered twice"
            self.status = message["status"]
            self.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        else:
            assert self.status is not None
            self.body += message.get("body", b"")

    @property
    def json(self):
        assert int(self.headers["content-length"]) == len(self.body)
        return msgspec.json.decode(self.body)

    @property
    def events(self):
        assert self.body.endswith(b"\n\n")
        parts = self.body.decode().split("\n\n")[:-1]
        assert all(part.startswith("data: ") for part in parts)
        return [msgspec.json.decode(p[6:]) for p in parts if p != "data: [DONE]"]


async def request(  # noqa: PLR0913 - the parts of an HTTP request
    app, method, path, *, body=b"", token=None, chunks=None, request_id=None, query=b""
):
    """Call an ASGI application as a server would; `app.inner` is what vLLM calls the app."""
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    if request_id is not None:
        headers.append((b"x-request-id", request_id.encode()))
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query,
        "headers": headers,
        "app": app.inner,
    }
    parts = list(chunks) if chunks is not None else [body]

    async def receive():
        if not parts:
            return {"type": "http.disconnect"}
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    answer = Answer()
    await app(scope, receive, answer.send)
    return answer
