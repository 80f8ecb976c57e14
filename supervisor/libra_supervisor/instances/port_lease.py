"""A TCP port that is held from the moment we name it until its server has it.

The lease keeps a socket bound with SO_REUSEADDR and never listens. Linux lets vLLM, which binds
with SO_REUSEADDR too, share the port and listen on it; the kernel hands the port to nobody who
asks for a free one, and refuses it to who binds plainly. Should a third SO_REUSEADDR server get in
between all the same, vLLM exits with EADDRINUSE and its next start takes another port.
"""

import errno
import socket
from pathlib import Path
from typing import Final

from libra.errors import SiteError

CONNECTION_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
TIME_WAIT: Final = "06"


class PortLease:
    """One held port; `close` gives it back."""

    def __init__(self, held: socket.socket) -> None:
        self._held = held
        self.port: int = held.getsockname()[1]

    def close(self) -> None:
        self._held.close()


def lease_port(host: str, port: int = 0, *, key: str = "rollout_port_base") -> PortLease:
    """Hold `port` on `host`, or a free one for 0. Raises SiteError naming `key` when taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if port and not _is_unused(family, host, port):
        raise SiteError(_in_use(host, port, key))
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRINUSE:
            raise SiteError(_in_use(host, port, key)) from error
        raise SiteError(f"{key}: {host}:{port} cannot be used: {error.strerror}") from error
    return PortLease(held)


def _is_unused(family: int, host: str, port: int) -> bool:
    """Without SO_REUSEADDR, so that whoever is bound there shows even before it listens.

    What a server that has ended leaves of its connections (TIME_WAIT, a minute) is nobody: a new
    one could listen there at once.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return _has_closed_connections(port) and _can_listen(family, host, port)
    return True


def _can_listen(family: int, host: str, port: int) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _has_closed_connections(port: int) -> bool:
    """Whether the kernel still remembers connections of this local port."""
    for table in CONNECTION_TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *_ = line.split()
            if state == TIME_WAIT and int(local.rpartition(":")[2], 16) == port:
                return True
    return False


def _in_use(host: str, port: int, key: str) -> str:
    return (
        f"{key}: port {port} on {host} is in use; end what listens there "
        f"(ss -ltnp 'sport = :{port}'), change {key}, or set it to 0 for any free port"
    )
