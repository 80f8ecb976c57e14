"""Sends vLLM's answer to a completion on, with its version spans."""

from typing import Literal

import msgspec

from libra.errors import InvariantError, RefusedError
from libra.serving.answer_record import AnswerRecord
from libra.serving.http import Message, Send, answer_error, error_body
from libra.serving.stamping import DATA, EVENT_END, stamp_body, stamp_events
from libra.wire.instance import VERSIONS_HEADER, WEIGHTS_UNKNOWN

OK = 200
SERVER_FAULT = 500
UNAVAILABLE = 503

ERROR = DATA + b'{"error":'
REFUSED_WHILE_WAITING = f"{WEIGHTS_UNKNOWN}: a reload failed while this request waited for it"

Kind = Literal["json", "events", "refused", "other"]


class AnswerSender:
    """Takes vLLM's ASGI messages for one completion; `send` is the way to the client."""

    def __init__(self, send: Send, record: AnswerRecord) -> None:
        self._send = send
        self._record = record
        self._kind: Kind = "other"
        self._start: Message = {}
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._on_start(message)
        elif message["type"] == "http.response.body":
            await self._on_body(message)
        else:
            await self._send(message)

    async def _on_start(self, message: Message) -> None:
        self._kind = self._kind_of(message)
        if self._kind == "json":
            # Held back: the spans change the length and decide about the status.
            self._start = message
        elif self._kind == "refused":
            await answer_error(self._send, UNAVAILABLE, REFUSED_WHILE_WAITING)
        else:
            await self._send(message)

    async def _on_body(self, message: Message) -> None:
        if self._kind == "json":
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_json()
        elif self._kind == "events":
            await self._send({**message, "body": await self._events(message.get("body", b""))})
        elif self._kind == "other":
            await self._send(message)

    def _kind_of(self, message: Message) -> Kind:
        if self._record.was_refused:
            return "refused"
        headers = {key.lower(): value for key, value in message["headers"]}
        content_type = headers.get(b"content-type", b"")
        if message["status"] != OK:
            return "other"
        if content_type.startswith(b"text/event-stream"):
            return "events"
        return "json" if content_type.startswith(b"application/json") else "other"

    async def _send_json(self) -> None:
        try:
            stamped = await stamp_body(bytes(self._body), self._record)
        except RefusedError as exc:
            await answer_error(self._send, UNAVAILABLE, str(exc))
        except InvariantError as exc:
            await answer_error(self._send, SERVER_FAULT, str(exc))
        else:
            versions = ",".join(map(str, stamped.versions)).encode()
            kept = [(k, v) for k, v in self._start["headers"] if k.lower() != b"content-length"]
            headers = [
                *kept,
                (b"content-length", str(len(stamped.content)).encode()),
                (VERSIONS_HEADER.lower().encode(), versions),
            ]
            await self._send({**self._start, "headers": headers})
            await self._send({"type": "http.response.body", "body": stamped.content})

    async def _events(self, chunk: bytes) -> bytes:
        if self._record.was_refused and chunk.startswith(ERROR):
            return _error_event(UNAVAILABLE, REFUSED_WHILE_WAITING)
        try:
            return await stamp_events(chunk, self._record)
        except RefusedError as exc:
            return _error_event(UNAVAILABLE, str(exc))
        except InvariantError as exc:
            return _error_event(SERVER_FAULT, str(exc))


def _error_event(status: int, message: str) -> bytes:
    return DATA + msgspec.json.encode(error_body(status, message)) + EVENT_END
