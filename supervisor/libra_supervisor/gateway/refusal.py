"""LibraError -> an HTTP answer in OpenAI's form: one table.

Retry rules. What no engine has worked on may be sent again: 503 with Retry-After. What an engine
has worked on is 502 and says so in X-Should-Retry (the official client obeys it), because sending
it again would sample twice. Nothing answers 504: clients take it for a reason to retry.
"""

import msgspec
from aiohttp import web

from libra.errors import LibraError, PeerError, RefusedError, RejectedError

RETRY_AFTER_S = 1


class _Detail(msgspec.Struct):
    message: str
    type: str
    code: int
    param: None = None


class _Body(msgspec.Struct):
    error: _Detail


def refusal(error: LibraError) -> web.Response:
    """Answer a request that has no answer from an engine."""
    status, kind = _status_of(error)
    is_worth_a_retry = isinstance(error, RefusedError)
    headers = {"X-Should-Retry": "true" if is_worth_a_retry else "false"}
    if is_worth_a_retry:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    body = error_body(str(error), kind=kind, code=status)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def error_body(message: str, *, kind: str, code: int) -> bytes:
    return msgspec.json.encode(_Body(_Detail(message, kind, code)))


def error_event(message: str) -> bytes:
    """The last event of a stream that breaks off."""
    return b"data: " + error_body(message, kind="engine_error", code=502) + b"\n\n"


def _status_of(error: LibraError) -> tuple[int, str]:
    match error:
        case RejectedError():
            return 400, "invalid_request_error"
        case RefusedError():
            return 503, "overloaded_error"
        case PeerError():
            return 502, "engine_error"
        case _:
            return 500, "internal_error"
