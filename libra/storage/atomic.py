"""Files and directories that appear whole or not at all, and survive a power cut once they do."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from libra.errors import SiteError

PARTIAL_SUFFIX = ".partial"
DISCARDED_SUFFIX = ".discarded"


def fsync_file(path: Path) -> None:
    """Force the content of one file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Force the names in `path` to the disk; its files' contents are not touched."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `content`: a reader sees the old or the new file, never a mixture."""
    partial = partial_sibling(path)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_record(path: Path, content: bytes) -> None:
    """`atomic_write` of what a run does not go on without.

    Raises SiteError with what the disk said; what was there before is still there then.
    """
    try:
        atomic_write(path, content)
    except OSError as error:
        raise SiteError(f"cannot write {path}: {error.strerror}") from error


def partial_sibling(path: Path, writer: str = "") -> Path:
    """Where the content of `path` grows before it is renamed; hidden, on the same file system.

    Writers with different names have different ones.
    """
    mark = f".{writer}" if writer else ""
    return path.with_name(f".{path.name}{mark}{PARTIAL_SUFFIX}")


def publish_directory(partial: Path, final: Path, *, is_durable: bool = True) -> None:
    """Make `partial` durable with all its files, then give it its final name.

    Without `is_durable` it may be lost with the machine. Raises FileExistsError when `final` is
    there already: a published directory never changes.
    """
    for parent, _, names in os.walk(partial) if is_durable else ():
        for name in names:
            fsync_file(Path(parent, name))
        fsync_directory(Path(parent))
    # rename(2) would silently replace an empty directory.
    if final.exists():
        raise FileExistsError(f"{final} exists already")
    partial.rename(final)
    if is_durable:
        fsync_directory(final.parent)


def discard_directory(path: Path) -> Path | None:
    """Delete a directory so that nobody can see half of it: renamed first, then removed.

    Returns what is left, under a hidden name, because something in it cannot be deleted. Raises
    OSError when it cannot even be renamed.
    """
    discarded = path.with_name(f".{path.name}{DISCARDED_SUFFIX}")
    shutil.rmtree(discarded, ignore_errors=True)
    path.rename(discarded)
    fsync_directory(path.parent)
    shutil.rmtree(discarded, ignore_errors=True)
    return discarded if discarded.exists() else None


def sweep_unfinished(parent: Path) -> list[Path]:
    """Remove what interrupted writers and removers left directly in `parent`; returns it.

    What of it cannot be deleted is still there afterwards.
    """
    leftovers = [
        entry
        for entry in sorted(parent.iterdir())
        if entry.name.startswith(".") and entry.name.endswith((PARTIAL_SUFFIX, DISCARDED_SUFFIX))
    ]
    for entry in leftovers:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with suppress(OSError):
                entry.unlink()
    return leftovers


@contextmanager
def growing_directory(final: Path, *, is_durable: bool = True) -> Generator[Path]:
    """Grow a partial sibling of `final` that is published when the block ends without an error.

    A leftover of an earlier try is removed; after an error the partial directory is removed too.
    Without `is_durable` what is published may be lost with the machine.
    """
    if final.exists():
        raise FileExistsError(f"{final} exists already")
    partial = partial_sibling(final)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        publish_directory(partial, final, is_durable=is_durable)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
