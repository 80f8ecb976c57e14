"""A checkpoint's weights as a directory in Hugging Face format, written by a process of its own."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from libra.errors import ChildError, ConfigError, DataError, LibraError, SiteError
from libra.ids import RunId
from libra.storage.checkpoints import read_checkpoint_manifest
from libra_supervisor.run_directory import RunDirectory

ERRORS: Mapping[int, type[LibraError]] = {2: DataError, 5: SiteError}
LAST_LINES = 20


def run_of(checkpoint: Path) -> RunDirectory:
    """The run that a checkpoint belongs to.

    Raises DataError when there is no complete checkpoint at `checkpoint`, ConfigError when it lies
    in no run directory.
    """
    read_checkpoint_manifest(checkpoint)
    directory = RunDirectory(checkpoint.resolve().parent.parent)
    if not directory.resolved_config_json.exists():
        raise ConfigError(
            f"{checkpoint} is in no run directory: {directory.resolved_config_json} is not there, "
            "which says what model it is of"
        )
    return directory


def export_checkpoint(
    checkpoint: Path, out: Path, *, run_id: RunId, environ: Mapping[str, str]
) -> None:
    """Write the weights of a complete checkpoint to `out`, which must not exist.

    Raises DataError for a checkpoint that cannot be used, SiteError for an `out` that cannot be
    written, ChildError when the process dies.
    """
    directory = run_of(checkpoint)
    if out.exists():
        raise SiteError(f"{out} exists already")
    command = [
        *(sys.executable, "-m", "libra.trainer.export"),
        *("--config", str(directory.resolved_config_json)),
        *("--checkpoint", str(checkpoint.resolve()), "--out", str(out.resolve())),
        *("--run-id", run_id),
    ]
    done = subprocess.run(  # noqa: S603 - our own module, and paths as arguments
        command, env=dict(environ), check=False, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        said = "\n".join(done.stderr.splitlines()[-LAST_LINES:])
        kind = ERRORS.get(done.returncode, ChildError)
        raise kind(f"export of {checkpoint} failed with exit code {done.returncode}: {said}")
