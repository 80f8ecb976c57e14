"""Small weight directories for tests, without torch."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from libra.storage.digest import file_entry
from libra.storage.manifests import write_manifest
from libra.storage.safetensors import model_tensors
from libra.weights.manifest import FORMAT, MANIFEST_NAME, WeightsManifest


def tiny_tensors(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "model.embed_tokens.weight": rng.standard_normal((16, 4), dtype=np.float32),
        "model.layers.0.mlp.weight": rng.standard_normal((4, 4), dtype=np.float32),
        "lm_head.weight": rng.standard_normal((16, 4), dtype=np.float32),
    }


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, str(path))


def publish_weights(
    root: Path,
    version: int,
    *,
    run_id: str = "run-1",
    tensors: dict[str, np.ndarray] | None = None,
    tied_embeddings: bool = False,
) -> tuple[Path, str]:
    """Write `root/vNNNNNN` with one safetensors file; returns the directory and its hash."""
    directory = root / f"v{version:06d}"
    directory.mkdir(parents=True)
    write_tensors(directory / "model.safetensors", tensors or tiny_tensors(version))
    return directory, describe_version(
        directory, version, run_id=run_id, tied_embeddings=tied_embeddings
    )


def describe_version(
    directory: Path, version: int, *, run_id: str, tied_embeddings: bool = False
) -> str:
    """Write the manifest of what lies in `directory` now; returns its hash."""
    files = sorted(path for path in directory.iterdir() if path.name != MANIFEST_NAME)
    manifest = WeightsManifest(
        format=FORMAT,
        run_id=run_id,
        policy_version=version,
        tied_embeddings=tied_embeddings,
        files=tuple(file_entry(path) for path in files),
        tensors=tuple(model_tensors(directory)),
    )
    return write_manifest(directory, manifest)
