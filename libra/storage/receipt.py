"""Receipts for checked weights: which files were read in full, so that nobody has to do it again.

On one host every process reads a file through one page cache. So a file that is still the same
inode, of the same size, changed at the same instant under the same kernel, has the bytes that were
checked. The instant is ctime, which no program can set back. It says whether a check still holds,
never whether weights are complete: only reading them says that.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from libra import clock
from libra.storage.digest import hash_bytes
from libra.wire.instance import FileStamp, WeightsReceipt

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
SETTLE_S: Final = 0.02
"""Kernels count ctime in ticks of up to 10 ms: two changes within one look like one."""


def stamps_of(directory: Path, names: Iterable[str]) -> tuple[FileStamp, ...]:
    """Stamps of the named files, in their order. Raises OSError when one is not there."""
    found = ((name, (directory / name).stat()) for name in names)
    return tuple(
        FileStamp(name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_ctime_ns)
        for name, stat in found
    )


def digest_of(stamps: tuple[FileStamp, ...]) -> str:
    """A short name of these stamps."""
    return hash_bytes(msgspec.msgpack.encode(stamps))


def are_settled(stamps: Iterable[FileStamp]) -> bool:
    """Whether a change from now on would show in a stamp.

    False just after a change, and when a file seems to have been changed in the future: then
    another host's clock made the time.
    """
    newest_ns = max((stamp.changed_ns for stamp in stamps), default=0)
    return clock.wall_ns() - newest_ns > SETTLE_S * 1e9


def receipt_for(stamps: tuple[FileStamp, ...]) -> WeightsReceipt:
    return WeightsReceipt(kernel=_boot_id(), files=stamps)


def holds(receipt: WeightsReceipt, directory: Path, names: Iterable[str]) -> bool:
    """Whether the files named are those that the receipt is for, unchanged and on this host."""
    return receipt.kernel == _boot_id() and is_as_stamped(directory, names, receipt.files)


def is_as_stamped(directory: Path, names: Iterable[str], stamps: tuple[FileStamp, ...]) -> bool:
    """Whether the files named are still those that have these stamps."""
    try:
        return stamps_of(directory, names) == stamps
    except OSError:
        return False


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
