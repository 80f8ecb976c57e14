"""What a supervisor that was killed left running: its run takes it over or ends it.

So neither its memory nor its ports stand in the way of the supervisor that comes after.
"""

import os
from urllib.parse import urlsplit

import msgspec
import psutil

from libra_supervisor.journal import StateFile, SupervisorState
from libra_supervisor.process.identity import ProcessIdentity, is_running
from libra_supervisor.process.kernel import read_table, read_tag
from libra_supervisor.run_directory import RunDirectory, held_by


class Held(msgspec.Struct, frozen=True, kw_only=True):
    num_bytes: int = 0
    """Memory that only these processes use."""

    ports: frozenset[int] = frozenset()


NOTHING = Held()


def held_by_run(directory: RunDirectory) -> Held:
    """What processes of this run hold now; whoever starts some holds the run directory."""
    state = StateFile(directory.state).load()
    if state is None:
        return NOTHING
    tagged = [
        row.pid
        for row in read_table().values()
        if not row.is_dead and (tag := read_tag(row.pid)) is not None and tag[0] == state.run_id
    ]
    return Held(num_bytes=sum(map(_own_bytes, tagged)), ports=_ports(state))


def run_on_port(port: int) -> str:
    """Which process of a run of this user listens there, in words; empty when none is known to."""
    try:
        listening = {
            it.pid
            for it in psutil.net_connections("tcp")
            if it.status == psutil.CONN_LISTEN and it.laddr and it.laddr.port == port
        }
    except (psutil.Error, OSError):
        return ""
    return next(filter(None, (_of_a_run(pid) for pid in listening if pid is not None)), "")


def _of_a_run(pid: int) -> str:
    try:
        if psutil.Process(pid).uids().effective != os.geteuid():
            return ""
    except psutil.Error:
        return ""
    if (directory := held_by(pid)) is not None:
        return f"the supervisor of {directory.root} (pid {pid})"
    tag = read_tag(pid)
    return "" if tag is None else f"{tag[1]} of the run {tag[0]} (pid {pid})"


def _ports(state: SupervisorState) -> frozenset[int]:
    """Of the servers in the record that still run, by start time and boot."""
    ports = {
        urlsplit(record.facts["url"]).port
        for record in state.children
        if "url" in record.facts
        and is_running(ProcessIdentity(record.pid, record.start_ticks, record.boot_id))
    }
    return frozenset(port for port in ports if port is not None)


def _own_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return 0
