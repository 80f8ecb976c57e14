"""A cgroup v2 group per child, where this process may make groups.

A group is the only fence that a descendant cannot leave, and `cgroup.kill` ends all of it at
once. Groups are made only where they were delegated: under systemd that is a unit with
`Delegate=yes`; where no systemd manages the tree (containers), a writable group is enough.
"""

import os
import time
from pathlib import Path
from typing import Final

import msgspec

from libra.ids import ChildId

_PREFIX: Final = "libra-"
_YOUNG_NS: Final = 60_000_000_000


class Cgroup(msgspec.Struct, frozen=True):
    """One child's group, by its directory."""

    path: str

    def pids(self) -> tuple[int, ...]:
        """Return the processes in the group and below it; none when the group is gone."""
        found: list[int] = []
        for directory, _, files in os.walk(self.path):
            if "cgroup.procs" in files:
                found += _pids_in(Path(directory) / "cgroup.procs")
        return tuple(found)

    def kill(self) -> None:
        """SIGKILL every process in the group and below; a group that is gone has none."""
        try:
            Path(self.path, "cgroup.kill").write_text("1", encoding="ascii")
        except FileNotFoundError:
            return

    def remove(self) -> bool:
        """Remove the group and those below; False while something still lives in it."""
        try:
            for directory, _, _ in os.walk(self.path, topdown=False):
                Path(directory).rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


class CgroupRoot(msgspec.Struct, frozen=True):
    """The delegated group under which children get theirs."""

    path: str

    def make(self, child_id: ChildId) -> Cgroup:
        """Make a fresh group for one start of `child_id`."""
        # The time makes it fresh: a group that still holds an unkillable process stays where it is.
        path = Path(self.path, f"{_PREFIX}{child_id}-{time.monotonic_ns():x}")
        path.mkdir()
        return Cgroup(str(path))

    def of_process(self, pid: int) -> Cgroup | None:
        """The group that an earlier supervisor made for the process; None when there is none."""
        try:
            text = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
        except OSError:
            return None
        name = Path(_own_group(text) or "/").name
        path = Path(self.path, name)
        return Cgroup(str(path)) if name.startswith(_PREFIX) and path.is_dir() else None

    def tidy(self) -> None:
        """Remove groups that earlier lives left empty; those in use stay.

        A young one may be another supervisor's that has not put its process in yet.
        """
        for path in Path(self.path).glob(f"{_PREFIX}*-*"):
            made_at_ns = _made_at_ns(path.name)
            if time.monotonic_ns() - made_at_ns > _YOUNG_NS:
                Cgroup(str(path)).remove()


def delegated_root() -> CgroupRoot | None:
    """Our own group, tidied, when we may make groups in it; else None."""
    path = own_cgroup()
    if path is None or not _is_delegated(path) or not _has_kill(path):
        return None
    root = CgroupRoot(path)
    root.tidy()
    return root


def own_cgroup() -> str | None:
    """The directory of this process's group; None where cgroup v2 is not mounted."""
    mount = _cgroup2_mount(Path("/proc/self/mounts").read_text(encoding="utf-8"))
    relative = _own_group(Path("/proc/self/cgroup").read_text(encoding="utf-8"))
    if mount is None or relative is None:
        return None
    return mount + relative.rstrip("/")


def _made_at_ns(name: str) -> int:
    try:
        return int(name.rpartition("-")[2], 16)
    except ValueError:
        return time.monotonic_ns()  # not one of ours: as young as can be


def _cgroup2_mount(mounts: str) -> str | None:
    for line in mounts.splitlines():
        _, place, kind, *_ = line.split(" ")
        if kind == "cgroup2":
            return place
    return None


def _own_group(cgroup: str) -> str | None:
    for line in cgroup.splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::")
    return None


def _is_delegated(path: str) -> bool:
    if not os.access(path, os.W_OK):
        return False
    if not Path("/run/systemd/system").is_dir():
        return True
    return os.geteuid() != 0 or _has_delegate_mark(path)


def _has_delegate_mark(path: str) -> bool:
    for name in ("user.delegate", "trusted.delegate"):
        try:
            if os.getxattr(path, name) == b"1":
                return True
        except OSError:
            continue
    return False


def _has_kill(path: str) -> bool:
    # The root group has no cgroup.kill, its children do from Linux 5.14 on; so try one.
    probe = Path(path, f"{_PREFIX}probe-{time.monotonic_ns():x}")
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        return (probe / "cgroup.kill").exists()
    finally:
        probe.rmdir()


def _pids_in(procs: Path) -> list[int]:
    try:
        return [int(line) for line in procs.read_text(encoding="ascii").split()]
    except OSError:
        return []
