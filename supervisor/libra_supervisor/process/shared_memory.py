"""Segments in /dev/shm that killed processes leave behind.

Python's multiprocessing names them psm_* and sem.mp-*; a process that exits by itself unlinks
them, one that is killed cannot. Only names that a process of the tree was seen to map are ever
removed: /dev/shm may be shared with processes that this one cannot see.

A mapping is matched to its name by inode. The C library makes a semaphore under a temporary name,
links the final one to it and removes the first, so in its creator's maps it looks deleted.
"""

import os
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - the kernel's place, not a temporary file
_PREFIXES: Final = ("psm_", "sem.mp-")
_MAP_FIELDS: Final = 6


def any_segments() -> bool:
    """Whether there is anything that a process could have mapped; far cheaper than asking it."""
    try:
        names = os.listdir(SHARED_MEMORY)  # noqa: PTH208 - strings are enough
    except OSError:
        return False
    return any(name.startswith(_PREFIXES) for name in names)


def mapped_segments(pid: int) -> frozenset[str]:
    """Names under /dev/shm that the process maps and that multiprocessing made."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return frozenset()
    if SHARED_MEMORY.encode() not in maps:
        return frozenset()
    inodes = {inode for line in maps.splitlines() if (inode := _inode_in(line)) is not None}
    return frozenset(name for name, inode in _segments() if inode in inodes)


def unlink_unused(names: frozenset[str]) -> tuple[str, ...]:
    """Remove those segments that no live process maps; returns the names removed, sorted."""
    present = [name for name in sorted(names) if os.path.lexists(f"{SHARED_MEMORY}/{name}")]
    if not present:
        return ()
    in_use: set[str] = set()
    for pid in os.listdir("/proc"):  # noqa: PTH208 - thousands of entries
        if pid.isdigit():
            in_use |= mapped_segments(int(pid))
    return tuple(name for name in present if name not in in_use and _unlink(name))


def _segments() -> list[tuple[str, int]]:
    """Name and inode of every segment that multiprocessing made."""
    with os.scandir(SHARED_MEMORY) as entries:
        return [(e.name, e.inode()) for e in entries if e.name.startswith(_PREFIXES)]


def _inode_in(line: bytes) -> int | None:
    """The inode of a mapping under /dev/shm: `address perms offset dev inode path`."""
    fields = line.split(None, 5)
    is_shared = len(fields) == _MAP_FIELDS and fields[5].startswith(SHARED_MEMORY.encode() + b"/")
    return int(fields[4]) if is_shared else None


def _unlink(name: str) -> bool:
    try:
        Path(SHARED_MEMORY, name).unlink()
    except OSError:
        return False
    return True
