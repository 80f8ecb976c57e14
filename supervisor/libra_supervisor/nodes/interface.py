"""Which network interface of this machine has an address."""

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import Final

_SIOCGIFADDR: Final = 0x8915
_IPV6_TABLE: Final = Path("/proc/net/if_inet6")
_NAME_BYTES: Final = 16
_ADDRESS: Final = slice(20, 24)


def interface_of(host: str) -> str | None:
    """The interface with the address of `host`; None when there is none, as for another machine."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    wanted = {str(address[0]).partition("%")[0] for *_, address in found}
    for _, name in socket.if_nameindex():
        if _ipv4_of(name) in wanted:
            return name
    return next((name for address, name in _ipv6_addresses() if address in wanted), None)


def _ipv4_of(name: str) -> str | None:
    request = struct.pack(f"{_NAME_BYTES}s16x", name.encode()[: _NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            answer = fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[_ADDRESS])


def _ipv6_addresses() -> list[tuple[str, str]]:
    try:
        lines = _IPV6_TABLE.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [(str(ipaddress.IPv6Address(int(row[0], 16))), row[-1]) for row in rows]
