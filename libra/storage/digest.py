"""Content hashes. XXH3-128: fast enough to hash every published byte; guards against accidents."""

from pathlib import Path

import xxhash

from libra.weights.manifest import FileEntry

BLOCK_BYTES = 1 << 20


def hash_bytes(content: bytes) -> str:
    """Lower-case hex XXH3-128."""
    return xxhash.xxh3_128_hexdigest(content)


def hash_file(path: Path) -> str:
    """Lower-case hex XXH3-128 of a whole file, read block by block."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def file_entry(path: Path, *, name: str | None = None) -> FileEntry:
    """Describe for a manifest what is at `path`, under `name` (default: its own file name)."""
    return FileEntry(
        name=name or path.name, num_bytes=path.stat().st_size, xxh3_128=hash_file(path)
    )


def hash_of_weights(directory: Path) -> str:
    """One hash over the contents of all safetensors files of a model directory."""
    hashes = [hash_file(path) for path in sorted(directory.glob("*.safetensors"))]
    return hash_bytes("".join(hashes).encode())
