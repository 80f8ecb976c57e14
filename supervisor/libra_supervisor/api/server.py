"""The API's listeners: the Unix socket always, TCP when the configuration asks for it."""

import ipaddress
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from libra.config.supervision import ApiConfig
from libra.errors import SiteError
from libra_supervisor.api.access import guard_tcp, guard_unix
from libra_supervisor.api.control import MAX_BODY_BYTES, ControlPort, routes
from libra_supervisor.process.peer import listen

SHUTDOWN_S = 2.0


@asynccontextmanager
async def api_server(
    control: ControlPort,
    *,
    config: ApiConfig,
    socket_path: Path,
    token: str,
    more_tcp_routes: Sequence[web.RouteDef] = (),
) -> AsyncIterator[int | None]:
    """Serve while the block runs; yields the TCP port, None when there is none.

    Raises SiteError when the port is in use.
    """
    table = routes(control)
    unix = web.Application(middlewares=[guard_unix()], client_max_size=MAX_BODY_BYTES)
    unix.add_routes(table)
    async with _running(unix) as runner:
        # The run directory's lock makes us the owner of whatever is left there.
        await web.SockSite(runner, listen(socket_path)).start()
        try:
            if config.api_port is None:
                yield None
                return
            guard = guard_tcp(token, is_loopback=is_loopback(config.api_host))
            # The gateway reads its bodies itself, with a limit of its own.
            tcp = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
            tcp.add_routes([*table, *more_tcp_routes])
            async with _running(tcp) as tcp_runner:
                yield await _listen_tcp(tcp_runner, config.api_host, config.api_port)
        finally:
            socket_path.unlink(missing_ok=True)  # noqa: ASYNC240 - a local name


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@asynccontextmanager
async def _running(application: web.Application) -> AsyncIterator[web.AppRunner]:
    # A gateway client that goes away must stop the engine's work, so its handler is cancelled.
    runner = web.AppRunner(
        application,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=SHUTDOWN_S,
        handler_cancellation=True,
    )
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


async def _listen_tcp(runner: web.AppRunner, host: str, port: int) -> int:
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        raise SiteError(
            f"api_port {port} on {host} cannot be used: {error.strerror or error}; "
            "choose another, or 0 for any free one"
        ) from error
    bound: tuple[str, int] = runner.addresses[0]
    return bound[1]
