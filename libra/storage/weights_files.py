"""A directory of published weights: written manifest last, believed once it was compared with it.

Everything here blocks: call it in a thread. No torch.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from libra.errors import DataError
from libra.ids import PolicyVersion, RunId
from libra.storage.safetensors_header import TensorSpan, read_header
from libra.weights.manifest import (
    FORMAT,
    MANIFEST_NAME,
    FileEntry,
    TensorEntry,
    WeightsManifest,
)

INDEX_NAME = "model.safetensors.index.json"
READ_BYTES = 8 * 2**20
MAX_PROBLEMS_SHOWN = 10

# A loader picks weights up by these endings, whether or not a manifest names them.
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf"})

# All exponent bits set means infinity or NaN. E4M3 has no infinity: only all ones is a NaN.
NON_FINITE_MASKS: dict[str, tuple[str, int]] = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F8_E5M2": ("<u1", 0x7C),
    "F8_E4M3": ("<u1", 0x7F),
}


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def write_manifest(
    directory: Path, *, run_id: RunId, policy_version: PolicyVersion, tied_embeddings: bool
) -> tuple[WeightsManifest, str]:
    """Describe every file of `directory`, flush them all, then write the manifest by rename.

    Returns the manifest and its hash. Afterwards no file of the directory may change.
    """
    files: list[FileEntry] = []
    tensors: list[TensorEntry] = []
    for path in _plain_files(directory):
        _fsync(path)
        files.append(
            FileEntry(name=path.name, num_bytes=path.stat().st_size, xxh3_128=hash_file(path))
        )
        if path.suffix == ".safetensors":
            tensors += [_entry(span, path.name) for span in read_header(path)]
    manifest = WeightsManifest(
        format=FORMAT,
        run_id=run_id,
        policy_version=policy_version,
        tied_embeddings=tied_embeddings,
        files=tuple(files),
        tensors=tuple(tensors),
    )
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    temporary = directory / f".{MANIFEST_NAME}.partial"
    temporary.write_bytes(content)
    _fsync(temporary)
    temporary.rename(directory / MANIFEST_NAME)
    _fsync(directory)
    return manifest, xxhash.xxh3_128_hexdigest(content)


def publish(temporary: Path, final: Path) -> None:
    """Give a directory with a finished manifest its name. Raises DataError if that is taken."""
    if final.exists():
        raise DataError(f"{final} exists already; a published version is never overwritten")
    temporary.rename(final)
    _fsync(final.parent)


def read_manifest(directory: Path) -> tuple[WeightsManifest, str]:
    """Return the manifest and its hash. Raises DataError on a missing, torn or foreign one."""
    path = directory / MANIFEST_NAME
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror}); not a complete version") from exc
    try:
        manifest = msgspec.json.decode(content, type=WeightsManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise DataError(f"{path}: not a manifest: {exc}") from exc
    if manifest.format != FORMAT:
        raise DataError(f"{path}: format {manifest.format}; this Libra reads format {FORMAT}")
    return manifest, xxhash.xxh3_128_hexdigest(content)


def verify_weights(
    directory: Path, manifest: WeightsManifest, *, check_values: bool = True
) -> None:
    """Compare every byte with the manifest; with `check_values` also refuse NaN and infinity.

    Raises DataError naming up to MAX_PROBLEMS_SHOWN problems. Reads each file once, or twice
    with `check_values`.
    """
    problems = [*_stray_files(directory, manifest), *_damaged_files(directory, manifest)]
    if not problems:
        problems = [*_index_problems(directory, manifest)]
        problems += _tensor_problems(directory, manifest, check_values=check_values)
    if problems:
        shown = "; ".join(problems[:MAX_PROBLEMS_SHOWN])
        more = len(problems) - MAX_PROBLEMS_SHOWN
        raise DataError(f"{directory}: {shown}" + (f"; and {more} more" if more > 0 else ""))


def read_tensors(directory: Path) -> tuple[TensorEntry, ...]:
    """Tensors a loader would find in `directory`, sorted by name; a manifest is not needed.

    With an index only the files it names count. Raises DataError on a broken file.
    """
    paths = sorted(directory.glob("*.safetensors"))
    index = _read_index(directory)
    if index is not None:
        paths = [path for path in paths if path.name in set(index.weight_map.values())]
    entries = (_entry(span, path.name) for path in paths for span in read_header(path))
    return tuple(sorted(entries, key=lambda entry: entry.name))


def hash_file(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _entry(span: TensorSpan, file: str) -> TensorEntry:
    return TensorEntry(name=span.name, dtype=span.dtype, shape=span.shape, file=file)


def _plain_files(directory: Path) -> list[Path]:
    paths = sorted(path for path in directory.iterdir() if path.name != MANIFEST_NAME)
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise DataError(f"{path}: a weights directory holds plain files only")
    return paths


def _stray_files(directory: Path, manifest: WeightsManifest) -> Iterator[str]:
    if not directory.is_dir():
        yield "is not a directory"
        return
    named = {entry.name for entry in manifest.files}
    for path in sorted(directory.iterdir()):
        is_weights = path.suffix in WEIGHT_SUFFIXES or path.name == INDEX_NAME
        if is_weights and path.name not in named:
            yield f"{path.name} is not in the manifest"


def _damaged_files(directory: Path, manifest: WeightsManifest) -> Iterator[str]:
    for entry in manifest.files:
        path = directory / entry.name
        if Path(entry.name).name != entry.name or entry.name in {"", ".", ".."}:
            yield f"{entry.name!r} is not a plain file name"
        elif path.is_symlink() or not path.is_file():
            yield f"{entry.name} is missing or not a plain file"
        elif (num_bytes := path.stat().st_size) != entry.num_bytes:
            yield f"{entry.name} has {num_bytes} bytes instead of {entry.num_bytes}"
        elif hash_file(path) != entry.xxh3_128:
            yield f"{entry.name} has other content than the manifest says"


def _read_index(directory: Path) -> _Index | None:
    path = directory / INDEX_NAME
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Index)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise DataError(f"{path}: not a safetensors index: {exc}") from exc


def _index_problems(directory: Path, manifest: WeightsManifest) -> Iterator[str]:
    index = _read_index(directory)
    if index is not None and index.weight_map != {t.name: t.file for t in manifest.tensors}:
        yield f"{INDEX_NAME} maps tensors otherwise than the manifest"


def _tensor_problems(
    directory: Path, manifest: WeightsManifest, *, check_values: bool
) -> Iterator[str]:
    found: dict[str, TensorEntry] = {}
    for file in manifest.files:
        if not file.name.endswith(".safetensors"):
            continue
        path = directory / file.name
        for span in read_header(path):
            if span.name in found:
                yield f"{span.name} is in {found[span.name].file} and in {file.name}"
            found[span.name] = _entry(span, file.name)
            if check_values and not _is_finite(path, span):
                yield f"{span.name} holds NaN or infinity"
    if found != {entry.name: entry for entry in manifest.tensors}:
        yield "the tensors in the files are not those of the manifest"


def _is_finite(path: Path, span: TensorSpan) -> bool:
    if span.dtype not in NON_FINITE_MASKS or span.start == span.end:
        return True
    word, mask = NON_FINITE_MASKS[span.dtype]
    words_per_read = READ_BYTES // np.dtype(word).itemsize
    with path.open("rb") as file:
        file.seek(span.start)
        left = (span.end - span.start) // np.dtype(word).itemsize
        while left > 0:
            values = np.fromfile(file, dtype=word, count=min(left, words_per_read))
            if ((values & mask) == mask).any():
                return False
            left -= len(values)
            if len(values) == 0:
                raise DataError(f"{path}: became shorter while it was read")
    return True


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
