"""Which attempt may write into a directory: the one that has claimed it last.

What is left of an earlier one, on a machine that nobody could reach, neither disturbs the newer
one's files nor publishes its own beside them.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final

from libra.storage.atomic import PARTIAL_SUFFIX, atomic_write, discard_directory

CLAIM_NAME: Final = ".writer"


def claim(directory: Path, writer: str) -> None:
    """Write here from now on; what others have begun is removed. Raises OSError.

    Renamed first: whoever still writes there has nothing more to publish.
    """
    directory.mkdir(parents=True, exist_ok=True)
    atomic_write(directory / CLAIM_NAME, writer.encode())
    for entry in sorted(directory.glob(f".*{PARTIAL_SUFFIX}")):
        if entry.is_dir():
            with suppress(OSError):
                discard_directory(entry)


def check_claim(directory: Path, writer: str) -> None:
    """Raises OSError when another has claimed the directory since."""
    try:
        holder = (directory / CLAIM_NAME).read_text()
    except FileNotFoundError:
        return
    if holder != writer:
        raise OSError(f"a later attempt ({holder}) writes here now, not this one ({writer})")
