"""The little of ASGI that the middleware needs: types, small answers, the bearer token."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import msgspec

from libra.errors import RejectedError
from libra.wire.bearer import has_bearer

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON_HEADERS = [(b"content-type", b"application/json")]


async def answer_json(send: Send, content: object, *, status: int = 200) -> None:
    body = msgspec.json.encode(content)
    length = (b"content-length", str(len(body)).encode())
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [*JSON_HEADERS, length],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})


async def answer_error(send: Send, status: int, message: str) -> None:
    await answer_json(send, error_body(status, message), status=status)


def error_body(status: int, message: str) -> dict[str, dict[str, object]]:
    """Shaped like vLLM's own errors, so that a client needs one reader."""
    return {"error": {"message": message, "type": "libra", "code": status}}


async def read_body(receive: Receive, *, max_bytes: int) -> bytes:
    """Raise RejectedError on a body above `max_bytes` or a client that went away."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RejectedError("the client left before its request was whole")
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise RejectedError(f"the request is longer than {max_bytes} bytes")
        if not message.get("more_body", False):
            return bytes(body)


def header(scope: Scope, name: bytes) -> bytes:
    """Return the value of the header, lower-case `name`; empty when it is absent."""
    return next((value for key, value in scope["headers"] if key.lower() == name), b"")


def has_token(scope: Scope, token: str) -> bool:
    """Whether the request carries the bearer token, compared in constant time."""
    said = header(scope, b"authorization").decode("utf-8", "surrogateescape")
    return has_bearer(said, token)


def path_of(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
