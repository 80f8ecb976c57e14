"""What makes a set of published weights complete. Reading and hashing live in `libra.storage`."""

import msgspec

from libra.ids import PolicyVersion, RunId

MANIFEST_NAME = "manifest.json"
FORMAT = 1


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the directory, the manifest itself excepted."""

    name: str
    num_bytes: int
    xxh3_128: str
    """Lower-case hex of the whole content."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor under its Hugging Face name."""

    name: str
    dtype: str
    """As safetensors writes it: F32, BF16, ..."""

    shape: tuple[int, ...]
    file: str


class WeightsManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last; its hash identifies the version's bytes everywhere."""

    format: int
    run_id: RunId
    policy_version: PolicyVersion
    tied_embeddings: bool
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
