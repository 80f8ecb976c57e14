"""Who a process is: a pid alone is reused, with start time and boot id it is not."""

from pathlib import Path

import msgspec

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Names one process for good, over restarts of the supervisor and of the machine."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: clock ticks from boot to the start of the process."""

    boot_id: str


class ProcessRow(msgspec.Struct, frozen=True):
    """What one line of /proc/PID/stat says."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    state: str
    """R S D T t Z X I; Z and X no longer run."""

    start_ticks: int
    name: str

    @property
    def is_dead(self) -> bool:
        return self.state in "ZX"


def boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()


def parse_stat(text: bytes) -> ProcessRow:
    """Parse /proc/PID/stat. The name may hold spaces and brackets, so it ends at the LAST one."""
    opening, closing = text.index(b"("), text.rindex(b")")
    fields = text[closing + 2 :].split()
    return ProcessRow(
        pid=int(text[:opening]),
        state=fields[0].decode("ascii"),
        ppid=int(fields[1]),
        pgid=int(fields[2]),
        sid=int(fields[3]),
        start_ticks=int(fields[19]),
        name=text[opening + 1 : closing].decode("utf-8", "replace"),
    )


def read_row(pid: int) -> ProcessRow | None:
    """Return the process's row, or None when there is no such process."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
    except (OSError, ValueError):
        return None


def identity_of(pid: int) -> ProcessIdentity | None:
    row = read_row(pid)
    return None if row is None else ProcessIdentity(pid, row.start_ticks, boot_id())


def is_running(identity: ProcessIdentity) -> bool:
    """Tell this very, running process from a zombie, a stranger on its pid, another boot."""
    row = read_row(identity.pid)
    return (
        row is not None
        and not row.is_dead
        and row.start_ticks == identity.start_ticks
        and identity.boot_id == boot_id()
    )
