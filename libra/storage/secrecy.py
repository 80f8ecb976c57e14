"""Whether a file that holds a secret is one for others, too."""

import os
import stat
import struct
from enum import IntEnum
from pathlib import Path
from typing import Final

_ACL: Final = "system.posix_acl_access"
_VERSION: Final = struct.pack("<I", 2)
_ENTRY: Final = struct.Struct("<HHI")
_READ: Final = 0o4


class _Tag(IntEnum):
    """Of an entry (linux/posix_acl.h)."""

    OWNER = 0x01
    USER = 0x02
    GROUP_OF_FILE = 0x04
    GROUP = 0x08
    MASK = 0x10
    OTHER = 0x20


def others_may_use(path: Path) -> bool:
    """Whether anybody but its owner, root and this process's user may read or change the file.

    systemd leaves a credential to root and gives the unit's user the right to read it by an access
    list where the file system has them, by owning it elsewhere. With a list, the bits of the
    group in the mode are the list's mask and say nothing of the group. Raises OSError.
    """
    found = path.stat()
    if not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return False
    return found.st_uid not in (0, os.geteuid()) or not _lets_only_us_read(path)


def _lets_only_us_read(path: Path) -> bool:
    try:
        raw = os.getxattr(path, _ACL)
    except OSError:
        return False  # there is no list: the mode says it all
    header, entries = raw[: len(_VERSION)], raw[len(_VERSION) :]
    if header != _VERSION or len(entries) % _ENTRY.size:
        return False
    return all(_is_harmless(*entry) for entry in _ENTRY.iter_unpack(entries))


def _is_harmless(tag: int, permissions: int, of: int) -> bool:
    if tag in (_Tag.OWNER, _Tag.MASK) or not permissions:
        return True
    return tag == _Tag.USER and of == os.geteuid() and permissions == _READ
