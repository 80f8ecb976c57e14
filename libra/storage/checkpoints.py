"""Training checkpoints on disk: which are complete, why others are not, and their rollout state.

A checkpoint is a directory `step_NNNNNN` that gets its name only once every file in it, the
manifest last, is on the disk. Megatron's shards in it are opaque here.
"""

import re
from pathlib import Path
from typing import Final

import msgspec

from libra.errors import DataError
from libra.storage.atomic import atomic_write
from libra.storage.digest import hash_bytes
from libra.storage.manifests import NOT_SEEN, NotVisibleYetError, verify_files
from libra.weights.manifest import FileEntry

CHECKPOINT_MANIFEST_NAME = "checkpoint.json"
ROLLOUT_STATE_NAME = "rollout_state.msgpack"
CHECKPOINT_FORMAT = 1
OWN_HASH: Final = "own_xxh3_128"
"""In the manifest, the hash of all else in it; the first checkpoints had none."""

_STEP_DIRECTORY = re.compile(r"step_(\d{6,})")


class TrainerLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The parallel layout that wrote a checkpoint; another one may load it."""

    world_size: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    has_distributed_optimizer: bool


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last. Positions are counted from the start of the run."""

    format: int
    step: int
    num_optimizer_steps: int
    """Position of the learning-rate schedule."""

    num_skipped_in_a_row: int
    architecture_hash: str
    """Of the model's shape; a checkpoint of another model is refused by it."""

    reference_hash: str | None
    """Of the weights of the KL reference; None when the objective has no reference."""

    layout: TrainerLayout
    files: tuple[FileEntry, ...]
    backend: str = "megatron_core"
    """`train_backend` that wrote the shards; the first checkpoints did not say."""


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One complete checkpoint."""

    step: int
    directory: Path
    manifest: CheckpointManifest
    newer_skipped: tuple[str, ...]
    """Why each newer directory was passed over, newest first."""


def checkpoint_name(step: int) -> str:
    """`step_000012`: sorts by step up to a million steps."""
    return f"step_{step:06d}"


def list_complete_checkpoints(
    directory: Path, *, with_hashes: bool = False
) -> list[CheckpointInfo]:
    """Return the complete checkpoints in `directory`, newest first; none when it does not exist.

    Complete means: the manifest can be read, fits the directory's name, and names exactly the
    files that are there with their sizes; `with_hashes` reads every byte as well.
    """
    return _sorted_out(directory, with_hashes=with_hashes)[0]


def newest_checkpoint(directory: Path) -> CheckpointInfo | None:
    """Return the newest complete checkpoint, every byte of it read; None when there never was one.

    Raises DataError when there are checkpoints and none can be used: whoever began anew in their
    place would replace them.
    """
    complete, skipped = _sorted_out(directory, with_hashes=True)
    if complete:
        return complete[0]
    if skipped:
        reasons = "".join(f"\n  {reason}" for reason in skipped)
        raise DataError(
            f"no checkpoint in {directory} can be used; restore one, or move them away to begin "
            f"anew:{reasons}"
        )
    return None


def _sorted_out(directory: Path, *, with_hashes: bool) -> tuple[list[CheckpointInfo], list[str]]:
    """Complete checkpoints, newest first, and why the others are not."""
    complete: list[CheckpointInfo] = []
    skipped: list[str] = []
    for step, path in sorted(_step_directories(directory), reverse=True):
        try:
            manifest = _verified_manifest(path, step, with_hashes=with_hashes)
        except DataError as error:
            skipped.append(str(error))
            continue
        complete.append(
            CheckpointInfo(
                step=step, directory=path, manifest=manifest, newer_skipped=tuple(skipped)
            )
        )
    return complete, skipped


def _verified_manifest(path: Path, step: int, *, with_hashes: bool) -> CheckpointManifest:
    manifest = read_checkpoint_manifest(path)
    if manifest.step != step:
        raise DataError(f"{path}: its manifest is of step {manifest.step}")
    verify_checkpoint(path, manifest, with_hashes=with_hashes)
    return manifest


def _step_directories(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    matches = [(_STEP_DIRECTORY.fullmatch(path.name), path) for path in directory.iterdir()]
    return [(int(match[1]), path) for match, path in matches if match and path.is_dir()]


def read_checkpoint_manifest(directory: Path) -> CheckpointManifest:
    """Read one checkpoint's manifest.

    Raises DataError when there is none to use, NotVisibleYetError when it may come into sight.
    """
    path = directory / CHECKPOINT_MANIFEST_NAME
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        own_hash = fields.pop(OWN_HASH, None)
        manifest = msgspec.convert(fields, CheckpointManifest)
    except OSError as error:
        kind = NotVisibleYetError if error.errno in NOT_SEEN else DataError
        raise kind(f"{path}: {error.strerror}; this checkpoint is not complete") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DataError(f"{path}: broken checkpoint manifest: {error}") from error
    if manifest.format != CHECKPOINT_FORMAT:
        raise DataError(
            f"{path}: format {manifest.format}; this version of Libra reads {CHECKPOINT_FORMAT}"
        )
    if own_hash is not None and own_hash != (found := _hash_of(fields)):
        raise DataError(f"{path}: was changed: it hashes to {found} instead of {own_hash}")
    return manifest


def write_checkpoint_manifest(directory: Path, manifest: CheckpointManifest) -> None:
    """Write the last file of a checkpoint, which makes the directory complete."""
    fields = msgspec.to_builtins(manifest)
    content = msgspec.json.encode(fields | {OWN_HASH: _hash_of(fields)})
    atomic_write(directory / CHECKPOINT_MANIFEST_NAME, msgspec.json.format(content))


def _hash_of(fields: dict[str, object]) -> str:
    """Of what is said, in whatever order and with whatever space between."""
    return hash_bytes(msgspec.json.encode(fields, order="deterministic"))


def verify_checkpoint(
    directory: Path, manifest: CheckpointManifest, *, with_hashes: bool = True
) -> None:
    """Check a checkpoint's files against its manifest; raises DataError saying what is wrong.

    NotVisibleYetError when something lacks that may still come into sight.
    """
    verify_files(
        directory,
        manifest.files,
        manifest_name=CHECKPOINT_MANIFEST_NAME,
        with_hashes=with_hashes,
    )


def read_rollout_state(directory: Path) -> bytes:
    """Return the rollout state of a checkpoint, byte for byte as the trainer was given it."""
    path = directory / ROLLOUT_STATE_NAME
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
