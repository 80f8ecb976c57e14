#!/usr/bin/env python3
"""A bare engine for gateway benchmarks: answers at once, or streams an event every few seconds.

scripts/bench/bench_engine.py [--event-s 2.0]        prints its port
"""

import argparse
import asyncio
import json
import resource

import uvloop

ANSWER = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "text": "word " * 128,
                "finish_reason": "length",
                "token_ids": list(range(128)),
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 128, "total_tokens": 131},
    }
).encode()
EVENT = b'data: {"choices":[{"index":0,"text":"word ","token_ids":[7]}]}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def answer_with(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


class Engine(asyncio.Protocol):
    """One connection; requests come one after the other."""

    event_s = 2.0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pending = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._pending += data
        while (end := self._request_end()) is not None:
            request, self._pending = bytes(self._pending[:end]), self._pending[end:]
            self._serve(request)

    def _request_end(self) -> int | None:
        head_end = self._pending.find(b"\r\n\r\n")
        if head_end < 0:
            return None
        head = bytes(self._pending[:head_end]).lower()
        at = head.find(b"content-length:")
        length = 0 if at < 0 else int(head[at + 15 :].split(b"\r\n", 1)[0])
        end = head_end + 4 + length
        return end if len(self._pending) >= end else None

    def _serve(self, request: bytes) -> None:
        if request.startswith(b"GET /v1/models"):
            self._transport.write(answer_with(b'{"object":"list","data":[{"id":"policy"}]}'))
        elif request.startswith(b"GET"):
            self._transport.write(answer_with(b"{}"))
        elif b'"stream": true' in request[-64:]:
            self._transport.write(STREAM_HEAD)
            self._send_event()
        else:
            self._transport.write(answer_with(ANSWER))

    def _send_event(self) -> None:
        self._transport.write(CHUNK)
        self._timer = asyncio.get_running_loop().call_later(self.event_s, self._send_event)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=8192)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--event-s", type=float, default=2.0)
    Engine.event_s = parser.parse_args().event_s
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(serve())
