"""supervisord as the benchmarks' peer: started with its best settings, asked over its socket."""

import http.client
import socket
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HEAD = """
[supervisord]
nodaemon=true
logfile={directory}/supervisord.log
pidfile={directory}/supervisord.pid
childlogdir={directory}
[unix_http_server]
file={directory}/s.sock
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
"""
PROGRAM = """
[program:{name}]
command={command}
autostart={autostart}
autorestart=true
startsecs=0
startretries=1000
stopasgroup=true
killasgroup=true
stopwaitsecs={stop_wait_s}
stdout_logfile={directory}/{name}.log
stdout_logfile_maxbytes=256MB
stdout_logfile_backups=20
redirect_stderr=true
"""


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.host)


class _Transport(xmlrpc.client.Transport):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: object) -> _Connection:  # noqa: ARG002 - the base's signature
        return _Connection(self._path)


class Supervisord:
    """A running supervisord; every call goes over its Unix socket."""

    def __init__(self, pid: int, directory: Path) -> None:
        self.pid = pid
        self.directory = directory

    def call(self, method: str, *arguments: object) -> object:
        proxy = xmlrpc.client.ServerProxy(
            "http://s", transport=_Transport(str(self.directory / "s.sock"))
        )
        return getattr(proxy.supervisor, method)(*arguments)


@contextmanager
def supervisord(
    directory: Path, programs: dict[str, str], *, autostart: bool, stop_wait_s: int = 1
) -> Iterator[Supervisord]:
    text = HEAD.format(directory=directory)
    for name, command in programs.items():
        text += PROGRAM.format(
            name=name,
            command=command,
            autostart=str(autostart).lower(),
            stop_wait_s=stop_wait_s,
            directory=directory,
        )
    config = directory / "supervisord.conf"
    config.write_text(text)
    program = Path(sys.executable).with_name("supervisord")
    process = subprocess.Popen([program, "-c", config], stdout=subprocess.DEVNULL)
    try:
        _wait_for_socket(directory / "s.sock")
        yield Supervisord(process.pid, directory)
    finally:
        process.terminate()
        process.wait(30)


def _wait_for_socket(path: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                time.sleep(0.05)
                continue
            return
    raise TimeoutError("supervisord does not answer")


def cpu_s(pid: int) -> float:
    """User and system time that the process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
