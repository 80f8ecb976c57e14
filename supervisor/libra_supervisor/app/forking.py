"""A new run that begins with the state of another one's checkpoint."""

import os
import shutil
from pathlib import Path

import msgspec

from libra.config.run import RunConfig
from libra.errors import ConfigError, SiteError
from libra.rollouts.buffer import BufferState
from libra.storage.atomic import growing_directory
from libra.storage.checkpoints import (
    ROLLOUT_STATE_NAME,
    read_checkpoint_manifest,
    verify_checkpoint,
    write_checkpoint_manifest,
)
from libra.storage.digest import file_entry
from libra_supervisor.app.prompts import Prompts
from libra_supervisor.loop.rollout_state import RolloutState, encoded
from libra_supervisor.run_directory import RunDirectory


def plant_checkpoint(
    checkpoint: Path,
    directory: RunDirectory,
    config: RunConfig,
    prompts: Prompts,
    *,
    trains: bool = True,
) -> int:
    """Put `checkpoint` into a new run's directory, the data at its beginning; returns its step.

    Model, optimizer and the position of the learning-rate schedule come from the checkpoint; data,
    trajectories and the KL reference are the new run's own. The source is never changed: files are
    linked where the file system can, else copied. `trains`: the run is to go further.

    Raises DataError for a checkpoint that is not complete, ConfigError for a run that would be
    over or cannot read it, SiteError when it cannot be written.
    """
    manifest = read_checkpoint_manifest(checkpoint)
    if manifest.backend != config.training.train_backend:
        raise ConfigError(
            f"train_backend {config.training.train_backend} cannot read {checkpoint}, which "
            f"{manifest.backend} wrote"
        )
    total_steps = config.control.total_steps
    if trains and total_steps is not None and total_steps <= manifest.step:
        raise ConfigError(
            f"total_steps {total_steps} is reached: steps count from the base model, and "
            f"{checkpoint} is of step {manifest.step}"
        )
    verify_checkpoint(checkpoint, manifest)
    empty = BufferState(complete=(), pending=(), quarantined=(), dropped={})
    rollout_state = encoded(RolloutState(buffer=empty, cursor=prompts.cursor.dump()))
    shards = [entry for entry in manifest.files if entry.name != ROLLOUT_STATE_NAME]
    try:
        with growing_directory(directory.checkpoint_of(manifest.step)) as partial:
            for entry in shards:
                _link_or_copy(checkpoint / entry.name, partial / entry.name)
            (partial / ROLLOUT_STATE_NAME).write_bytes(rollout_state)
            files = (*shards, file_entry(partial / ROLLOUT_STATE_NAME))
            planted = msgspec.structs.replace(manifest, files=files, reference_hash=None)
            write_checkpoint_manifest(partial, planted)
    except OSError as error:
        raise SiteError(f"{checkpoint} cannot be put into {directory.root}: {error}") from error
    return manifest.step


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
