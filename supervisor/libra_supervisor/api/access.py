"""Who may call: the same user over the Unix socket, the bearer of the run's token over TCP."""

import os
import secrets
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from libra.errors import SiteError
from libra.storage.secrecy import others_may_use
from libra.wire.bearer import has_bearer
from libra_supervisor.process.peer import peer_uid

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
READ_PATHS = frozenset({"/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions"})
"""Open on loopback; guarded as soon as the server listens anywhere else."""


def read_or_make_token(path: Path) -> str:
    """The token in `path`, made there with mode 0600 when missing.

    Raises SiteError when the file is empty or others may read it.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        try:
            token = path.read_text(encoding="ascii").strip()
        except ValueError:
            raise SiteError(f"the token file {path} holds more than plain ASCII") from None
        if not token:
            raise SiteError(f"the token file {path} is empty; write a token or remove it") from None
        if others_may_use(path):
            raise SiteError(f"others may read the token file {path}; chmod 600 it") from None
        return token
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    return token


def has_token(request: web.Request, token: str) -> bool:
    """Compare in constant time."""
    return has_bearer(request.headers.get("Authorization", ""), token)


def guard_unix() -> Middleware:
    """Refuse every peer that is neither our own user nor root."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        peer = None if request.transport is None else request.transport.get_extra_info("socket")
        if peer is None or peer_uid(peer) not in (os.getuid(), 0):
            return web.Response(status=403, text="only the run's own user may control it\n")
        return await handler(request)

    return check


def guard_tcp(token: str, *, is_loopback: bool) -> Middleware:
    """Ask for the token wherever the call could change something or comes from another host."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_open = request.path in OPEN_PATHS or (is_loopback and request.path in READ_PATHS)
        if not is_open and not has_token(request, token):
            return web.Response(
                status=401,
                text="this call needs the run's bearer token\n",
                headers={"WWW-Authenticate": 'Bearer realm="libra"'},
            )
        return await handler(request)

    return check
