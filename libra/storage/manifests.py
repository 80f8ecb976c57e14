"""Reading, writing and checking the manifest of published weights."""

import errno
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from libra.errors import DataError
from libra.storage.content import read_content
from libra.storage.digest import hash_bytes, hash_file
from libra.storage.receipt import are_settled, digest_of, receipt_for, stamps_of
from libra.storage.safetensors import model_tensors
from libra.weights.manifest import FORMAT, MANIFEST_NAME, FileEntry, WeightsManifest
from libra.wire.instance import FileStamp, WeightsReceipt

MAX_READERS: Final = 4
"""Files read at once by one check: as much as one host's memory is worth."""


NOT_SEEN: Final = frozenset({errno.ENOENT, errno.ESTALE})
"""What a host says of a shared disk that it has not looked at again."""


class NotVisibleYetError(DataError):
    """A manifest, or what it lists, is not there or short. On a shared disk it may still come."""


def write_manifest(directory: Path, manifest: WeightsManifest) -> str:
    """Write the manifest, which makes `directory` complete; returns the manifest's hash.

    The directory is one that nobody looks into yet.
    """
    content = msgspec.json.format(msgspec.json.encode(manifest))
    (directory / MANIFEST_NAME).write_bytes(content)
    return hash_bytes(content)


def read_manifest(directory: Path) -> tuple[WeightsManifest, str]:
    """Read the manifest of `directory`, and hash it. Raises DataError when there is none to use."""
    path = directory / MANIFEST_NAME
    try:
        # A pipe of that name would be waited for without end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(f"{path} is no regular file")
        content = path.read_bytes()
    except OSError as error:
        kind = NotVisibleYetError if error.errno in NOT_SEEN else DataError
        raise kind(f"{path}: {error.strerror}; these weights are not complete") from error
    try:
        manifest = msgspec.json.decode(content, type=WeightsManifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DataError(f"{path}: broken manifest: {error}") from error
    if manifest.format != FORMAT:
        raise DataError(f"{path}: format {manifest.format}; this version of Libra reads {FORMAT}")
    return manifest, hash_bytes(content)


def read_announced(directory: Path, manifest_hash: str) -> WeightsManifest:
    """Read the manifest that was announced with its hash.

    Another one is not an error but an old sight of the disk: an earlier attempt wrote it under the
    same name. Raises DataError, NotVisibleYetError when time may put it right.
    """
    manifest, found = read_manifest(directory)
    if found != manifest_hash:
        raise NotVisibleYetError(
            f"{directory}: the manifest hash is {found}, announced was {manifest_hash}"
        )
    return manifest


def verify_announced(directory: Path, manifest_hash: str) -> WeightsReceipt | None:
    """`verify_weights` with the manifest that was announced. Raises as it does."""
    return verify_weights(directory, read_announced(directory, manifest_hash))


def verify_weights(directory: Path, manifest: WeightsManifest) -> WeightsReceipt | None:
    """Check every byte of `directory` against its manifest; returns only when all is right.

    Sizes, no file too many, the safetensors headers against the tensor list, then in one pass
    hashes and the search for NaN and Inf. The receipt (`libra.storage.receipt`) spares others on
    this host that pass; None when the files are too new for one (`are_settled`).

    Raises DataError that says what is wrong, NotVisibleYetError when time may put it right. Reads
    all files: call it off the event loop.
    """
    stamps, are_trusted = verify_and_stamp(directory, manifest)
    return receipt_for(stamps) if are_trusted else None


def verify_and_stamp(
    directory: Path, manifest: WeightsManifest
) -> tuple[tuple[FileStamp, ...], bool]:
    """`verify_weights`, and the stamps of the files as they were checked.

    False: the files are so new that a change of them just before need not have shown.
    """
    verify_structure(directory, manifest)
    names = names_in(manifest)
    with _mapped(directory):
        before = stamps_of(directory, names)
        are_trusted = are_settled(before)
        _verify_content(directory, manifest)
        after = stamps_of(directory, names)
    if after != before:
        raise DataError(f"{directory}: was changed while it was checked")
    return after, are_trusted


def why_not_as_verified(directory: Path, manifest_hash: str | None, digest: str) -> str:
    """Why what lies there is no longer what was verified; empty when it is.

    `digest` is that of its stamps (`libra.storage.receipt.digest_of`).
    """
    try:
        manifest, found = read_manifest(directory)
        stamps = stamps_of(directory, names_in(manifest))
    except (DataError, OSError) as error:
        return f"{directory} cannot be read any more: {error}"
    is_same = found == manifest_hash and digest_of(stamps) == digest
    return "" if is_same else f"{directory} was changed while it was loaded"


def names_in(manifest: WeightsManifest) -> tuple[str, ...]:
    """File names in the manifest's order, which is a receipt's too."""
    return tuple(entry.name for entry in manifest.files)


def verify_structure(directory: Path, manifest: WeightsManifest) -> None:
    """Check all but the content: names, no links, sizes, and the headers against the tensor list.

    Raises as `verify_weights`.
    """
    verify_files(directory, manifest.files, manifest_name=MANIFEST_NAME, with_hashes=False)
    # What a link names lies elsewhere, where nobody keeps it and anybody may write.
    if links := [name for name in names_in(manifest) if (directory / name).is_symlink()]:
        raise DataError(f"{directory}: {links[0]} is a link")
    with _mapped(directory):
        _verify_tensors(directory, manifest)


def _verify_content(directory: Path, manifest: WeightsManifest) -> None:
    paths = [directory / entry.name for entry in manifest.files]
    with ThreadPoolExecutor(max_workers=MAX_READERS) as readers:
        contents = list(readers.map(read_content, paths))
    for path, entry, content in zip(paths, manifest.files, contents, strict=True):
        if content.xxh3_128 != entry.xxh3_128:
            raise DataError(
                f"{directory}: {entry.name} hashes to {content.xxh3_128} "
                f"instead of {entry.xxh3_128}"
            )
        if content.non_finite:
            raise DataError(f"{path}: NaN or Inf in {', '.join(content.non_finite[:3])}")


def verify_files(
    directory: Path,
    files: tuple[FileEntry, ...],
    *,
    manifest_name: str,
    with_hashes: bool = True,
) -> None:
    """Check that `directory` holds exactly `files` and the manifest, by size and by hash.

    Raises DataError, NotVisibleYetError when the first thing wrong is that something is lacking.
    """
    with _mapped(directory):
        problem = _find_wrong_names(directory, files, manifest_name)
        if not problem and (lack := _find_lack(directory, files)):
            raise NotVisibleYetError(f"{directory}: {lack}")
        problem = (
            problem
            or _find_wrong_sizes(directory, files)
            or (_find_wrong_hashes(directory, files) if with_hashes else "")
        )
    if problem:
        raise DataError(f"{directory}: {problem}")


@contextmanager
def _mapped(directory: Path) -> Iterator[None]:
    """Turn what the file system says into the errors promised above."""
    try:
        yield
    except OSError as error:
        kind = NotVisibleYetError if error.errno in NOT_SEEN else DataError
        raise kind(f"{directory}: cannot be read: {error}") from error


def _find_wrong_names(directory: Path, files: tuple[FileEntry, ...], manifest_name: str) -> str:
    listed = [entry.name for entry in files]
    # A name with a path in it would be read from outside the directory that was published.
    if odd := [name for name in listed if Path(name).name != name or name == manifest_name]:
        return f"the manifest lists the file name {odd[0]!r}"
    if len(set(listed)) != len(listed):
        return "the manifest lists a file twice"
    found = {path.name for path in directory.iterdir()} - {manifest_name}
    if extra := sorted(found - set(listed)):
        return f"{extra[0]} is there but not in the manifest"
    return ""


def _find_lack(directory: Path, files: tuple[FileEntry, ...]) -> str:
    """Name a file that is missing or shorter than it should be."""
    found = {path.name for path in directory.iterdir()}
    for entry in files:
        if entry.name not in found:
            return f"{entry.name} is missing"
        there = (directory / entry.name).stat()
        if stat.S_ISREG(there.st_mode) and there.st_size < entry.num_bytes:
            return f"{entry.name} has {there.st_size} bytes instead of {entry.num_bytes}"
    return ""


def _find_wrong_sizes(directory: Path, files: tuple[FileEntry, ...]) -> str:
    for entry in files:
        found = (directory / entry.name).stat()
        if not stat.S_ISREG(found.st_mode):
            return f"{entry.name} is no regular file"
        if found.st_size != entry.num_bytes:
            return f"{entry.name} has {found.st_size} bytes instead of {entry.num_bytes}"
    return ""


def _find_wrong_hashes(directory: Path, files: tuple[FileEntry, ...]) -> str:
    for entry in files:
        digest = hash_file(directory / entry.name)
        if digest != entry.xxh3_128:
            return f"{entry.name} hashes to {digest} instead of {entry.xxh3_128}"
    return ""


def _verify_tensors(directory: Path, manifest: WeightsManifest) -> None:
    expected = {tensor.name: tensor for tensor in manifest.tensors}
    found = {tensor.name: tensor for tensor in model_tensors(directory)}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise DataError(
                f"{directory}: tensor {name}: the manifest says {expected.get(name)}, "
                f"the files say {found.get(name)}"
            )
