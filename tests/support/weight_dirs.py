"""Small weight directories for tests, without torch."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from libra.ids import PolicyVersion, RunId
from libra.storage.weights_files import write_manifest


def tiny_tensors(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "model.embed_tokens.weight": rng.standard_normal((16, 4), dtype=np.float32),
        "model.layers.0.mlp.weight": rng.standard_normal((4, 4), dtype=np.float32),
        "lm_head.weight": rng.standard_normal((16, 4), dtype=np.float32),
    }


def publish_weights(
    root: Path,
    version: int,
    *,
    run_id: str = "run-1",
    tensors: dict[str, np.ndarray] | None = None,
) -> tuple[Path, str]:
    """Write `root/vNNNNNN` with one safetensors file; returns the directory and its hash."""
    directory = root / f"v{version:06d}"
    directory.mkdir(parents=True)
    save_file(tensors or tiny_tensors(version), str(directory / "model.safetensors"))
    _, manifest_hash = write_manifest(
        directory,
        run_id=RunId(run_id),
        policy_version=PolicyVersion(version),
        tied_embeddings=False,
    )
    return directory, manifest_hash
