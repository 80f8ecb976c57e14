"""Complete checkpoints: the trainer's state, the rollout side's, and last the manifest.

A save is begun in the main thread, between two steps, and ends in any other.
"""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from libra import clock
from libra.errors import DataError, InvariantError, SiteError
from libra.storage.arrival import check_written, until_visible
from libra.storage.atomic import partial_sibling, publish_directory
from libra.storage.checkpoints import (
    CHECKPOINT_FORMAT,
    ROLLOUT_STATE_NAME,
    CheckpointManifest,
    TrainerLayout,
    read_checkpoint_manifest,
    verify_checkpoint,
    write_checkpoint_manifest,
)
from libra.storage.digest import file_entry
from libra.storage.manifests import NotVisibleYetError
from libra.storage.writer_claim import check_claim
from libra.trainer.assembly import Trainer
from libra.trainer.backend import StagedState
from libra.trainer.world import World, barrier, sum_over_world
from libra.wire.rank import CheckpointSaved, SaveCheckpoint


class StagedCheckpoint:
    """A checkpoint whose content is settled; `write` makes it complete."""

    def __init__(
        self,
        command: SaveCheckpoint,
        world: World,
        state: StagedState | OSError,
        manifest: CheckpointManifest,
        *,
        writer: str,
        began_at: float,
    ) -> None:
        """`state`: or why there is nowhere to write it to."""
        self._partial = partial_sibling(Path(command.directory), writer)
        self._writer = writer
        self._command = command
        self._world = world
        self._state = state
        self._manifest = manifest
        self._began_at = began_at

    def write(self) -> CheckpointSaved | None:
        """Write and publish; every rank takes part, in any thread. Returns the news on rank 0.

        The directory appears with all its files durable, or not at all. Raises SiteError, on rank 0
        and where it happened, when that is not possible; of a snapshot the news says it.
        """
        error = ""
        try:
            self._write()
        except (OSError, NotVisibleYetError) as failure:
            error = f"checkpoint of step {self._command.step}: {failure}"
            if not self._command.is_snapshot:
                raise SiteError(error) from failure
        if self._world.at.rank:
            return None
        if error:
            shutil.rmtree(self._partial, ignore_errors=True)
        return CheckpointSaved(
            step=self._command.step,
            directory=self._command.directory,
            save_s=clock.monotonic() - self._began_at,
            error=error,
        )

    def _write(self) -> None:
        if isinstance(self._state, OSError):
            raise self._state
        failure: OSError | None = None
        results: list[Any] = []
        try:
            results = self._state.write(is_durable=not self._command.is_snapshot)
        except OSError as error:
            failure = error
        everything = self._gathered((results, None if failure is None else str(failure)))
        if failure is not None:
            raise failure
        if everything is not None:
            self._complete(self._state, everything)

    def _gathered(self, own: Any) -> list[Any] | None:
        """What every rank has to say, on rank 0."""
        world = self._world
        everything = [None] * world.size if world.at.rank == 0 else None
        dist.gather_object(own, everything, dst=0, group=world.files_group)
        return everything

    def _complete(self, state: StagedState, everything: list[Any]) -> None:
        failures = [
            f"rank {rank}: {failure}" for rank, (_, failure) in enumerate(everything) if failure
        ]
        if failures:
            raise OSError("; ".join(failures))
        final, partial = Path(self._command.directory), self._partial
        state.finish([results for results, _ in everything])
        (partial / ROLLOUT_STATE_NAME).write_bytes(self._command.rollout_state)
        files = tuple(file_entry(path) for path in sorted(partial.iterdir()))
        manifest = msgspec.structs.replace(self._manifest, files=files)
        write_checkpoint_manifest(partial, manifest)
        check_claim(final.parent, self._writer)
        publish_directory(partial, final, is_durable=not self._command.is_snapshot)


def stage_checkpoint(
    trainer: Trainer, command: SaveCheckpoint, *, writer: str = ""
) -> StagedCheckpoint:
    """Take the state of `command.step` into host memory; every rank takes part.

    `writer` names the attempt. Raises SiteError when the directory exists already or cannot be
    made, or a later attempt has claimed its parent; of a snapshot, `write` says so.
    """
    if command.step != trainer.learner.progress.step:
        raise InvariantError(
            f"asked to save step {command.step} at step {trainer.learner.progress.step}"
        )
    began_at = clock.monotonic()
    final = Path(command.directory)
    partial = partial_sibling(final, writer)
    failure: OSError | None = None
    try:
        if trainer.world.at.rank == 0:
            check_claim(final.parent, writer)
            _make_room(partial, final)
    except OSError as error:
        if not command.is_snapshot:
            raise SiteError(f"checkpoint of step {command.step}: {error}") from error
        failure = error
    # Every rank waits here for rank 0, which has made it, perhaps on another host.
    state: StagedState | OSError
    if any(sum_over_world(trainer.world, [float(failure is not None)])):
        state = failure or OSError("rank 0 could not make the directory")
    else:
        until_visible(lambda: check_written(partial, {}))
        state = trainer.backend.stage(partial)
    trainer.learner.beat("checkpoint")
    return StagedCheckpoint(
        command,
        trainer.world,
        state,
        _manifest(trainer),
        writer=writer,
        began_at=began_at,
    )


def restore_checkpoint(trainer: Trainer, directory: Path) -> None:
    """Load weights, optimizer and progress from a complete checkpoint, on this layout.

    Raises DataError when the checkpoint is damaged, of another model, or of another reference.
    """
    manifest = until_visible(lambda: read_checkpoint_manifest(directory))
    _refuse_stranger(trainer, directory, manifest)
    # Every rank reads the sizes; the bytes are hashed once.
    hashes = trainer.world.at.rank == 0
    until_visible(lambda: verify_checkpoint(directory, manifest, with_hashes=hashes))
    trainer.backend.restore(directory)
    progress = trainer.learner.progress
    progress.step = manifest.step
    progress.num_optimizer_steps = manifest.num_optimizer_steps
    progress.num_skipped_in_a_row = manifest.num_skipped_in_a_row
    barrier(trainer.world)


def restore_weights(trainer: Trainer, directory: Path) -> int:
    """Load the weights of a complete checkpoint, without optimizer and progress; returns its step.

    Any layout and optimizer may have written it. Raises DataError when it is damaged or of another
    model or backend.
    """
    manifest = until_visible(lambda: read_checkpoint_manifest(directory))
    _refuse_other_model(trainer, directory, manifest)
    until_visible(lambda: verify_checkpoint(directory, manifest))
    trainer.backend.restore_weights(directory)
    return manifest.step


def _make_room(partial: Path, final: Path) -> None:
    if final.exists():
        raise FileExistsError(f"{final} exists already")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _manifest(trainer: Trainer) -> CheckpointManifest:
    """All of the manifest but its files, which are not there yet."""
    progress, sizes = trainer.learner.progress, trainer.world.sizes
    return CheckpointManifest(
        format=CHECKPOINT_FORMAT,
        step=progress.step,
        num_optimizer_steps=progress.num_optimizer_steps,
        num_skipped_in_a_row=progress.num_skipped_in_a_row,
        architecture_hash=trainer.backend.model_hash,
        reference_hash=trainer.backend.reference_hash,
        layout=TrainerLayout(
            world_size=trainer.world.size,
            tensor=sizes.tensor,
            pipeline=sizes.pipeline,
            context=sizes.context,
            expert=sizes.expert,
            has_distributed_optimizer=trainer.backend.has_distributed_optimizer,
        ),
        backend=trainer.backend.name,
        files=(),
    )


def _refuse_other_model(trainer: Trainer, directory: Path, manifest: CheckpointManifest) -> None:
    backend = trainer.backend
    if manifest.backend != backend.name:
        raise DataError(
            f"{directory}: written with train_backend {manifest.backend}; resume with the same"
        )
    if manifest.architecture_hash != backend.model_hash:
        raise DataError(f"{directory}: a checkpoint of another model than model_path names")


def _refuse_stranger(trainer: Trainer, directory: Path, manifest: CheckpointManifest) -> None:
    _refuse_other_model(trainer, directory, manifest)
    backend = trainer.backend
    has_distributed = backend.has_distributed_optimizer
    if manifest.layout.has_distributed_optimizer != has_distributed:
        raise DataError(
            f"{directory}: written with megatron_use_distributed_optimizer: "
            f"{str(not has_distributed).lower()}; resume with the same setting"
        )
    # Megatron keeps experts that are spread over ranks in an optimizer of their own.
    if (manifest.layout.expert > 1) != (trainer.world.sizes.expert > 1):
        raise DataError(
            f"{directory}: written with train_ep_size {manifest.layout.expert}; a checkpoint with "
            "experts on one rank cannot be resumed with experts on several, nor the reverse"
        )
    if backend.reference_hash and manifest.reference_hash not in {None, backend.reference_hash}:
        raise DataError(
            f"{directory}: the run's KL reference has changed: model_path holds weights "
            f"{backend.reference_hash}, the checkpoint was trained against "
            f"{manifest.reference_hash}"
        )
