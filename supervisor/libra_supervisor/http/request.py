"""A request, as bytes."""

import re
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec

_BREAKS_A_LINE = re.compile(r"[\r\n\0]")
PORTS = {"http": 80, "https": 443}


class Origin(msgspec.Struct, frozen=True):
    """Where a server answers."""

    scheme: str
    host: str
    port: int
    netloc: str
    """As the Host header has it."""

    prefix: str
    """Before every path; empty or like `/name`."""

    @property
    def is_encrypted(self) -> bool:
        return self.scheme == "https"


@lru_cache(maxsize=4096)
def origin_of(base_url: str) -> Origin:
    """Like `http://127.0.0.1:8000` or `https://[::1]:8000/name`. Raises ValueError."""
    parts = urlsplit(base_url)
    if parts.scheme not in PORTS or parts.hostname is None or parts.username is not None:
        raise ValueError(f"{base_url!r} is no address of a server")
    port = parts.port or PORTS[parts.scheme]
    return Origin(parts.scheme, parts.hostname, port, parts.netloc, parts.path.rstrip("/"))


class Request(msgspec.Struct, frozen=True, kw_only=True):
    base_url: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | None
    connect_s: float


def head_of(request: Request, origin: Origin) -> bytes:
    """Everything before the body. Raises ValueError when a field would break out of its line."""
    lines = [
        f"{request.method} {origin.prefix}{request.path} HTTP/1.1",
        f"Host: {origin.netloc}",
        *[f"{name}: {value}" for name, value in request.headers.items()],
    ]
    if request.body is not None:
        lines.append(f"Content-Length: {len(request.body)}")
    for line in lines:
        if _BREAKS_A_LINE.search(line):
            raise ValueError(f"{line!r} is no line of a request")
    return "\r\n".join([*lines, "", ""]).encode()
