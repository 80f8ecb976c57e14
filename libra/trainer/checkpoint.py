"""Checkpoints through Megatron's distributed checkpointing: any layout writes, any layout reads."""

import queue
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from libra import clock
from libra.errors import DataError, InvariantError, SiteError
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
from libra.trainer.assembly import Trainer
from libra.trainer.optimizer import torch_optimizers
from libra.trainer.world import barrier
from libra.wire.rank import CheckpointSaved, SaveCheckpoint

# The only form that other layouts can load. It is safe because the model has one gradient bucket:
# with several, padded bucket ends silently corrupt it (megatron-core 0.19.2).
OPTIMIZER_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}


def save_checkpoint(trainer: Trainer, command: SaveCheckpoint) -> CheckpointSaved | None:
    """Write a complete checkpoint; every rank takes part. Returns the news on rank 0.

    The directory appears with all its files durable, or not at all. Raises SiteError when it
    exists already or cannot be written.
    """
    if command.step != trainer.learner.progress.step:
        raise InvariantError(
            f"asked to save step {command.step} at step {trainer.learner.progress.step}"
        )
    began_at = clock.monotonic()
    final = Path(command.directory)
    partial = partial_sibling(final)
    is_writer = trainer.world.at.rank == 0
    try:
        if is_writer:
            _make_room(partial, final)
        barrier(trainer.world)
        _keep_results_in_process()
        dist_checkpointing.save(_sharded_state(trainer, is_loading=False), str(partial))
        trainer.learner.beat("checkpoint")
        if is_writer:
            (partial / ROLLOUT_STATE_NAME).write_bytes(command.rollout_state)
            write_checkpoint_manifest(partial, _manifest(trainer, partial))
            publish_directory(partial, final)
    except OSError as error:
        raise SiteError(f"checkpoint of step {command.step}: {error}") from error
    barrier(trainer.world)
    if not is_writer:
        return None
    return CheckpointSaved(
        step=command.step, directory=command.directory, save_s=clock.monotonic() - began_at
    )


def restore_checkpoint(trainer: Trainer, directory: Path) -> None:
    """Load weights, optimizer and progress from a complete checkpoint, on this layout.

    Raises DataError when the checkpoint is damaged, of another model, or of another reference.
    """
    manifest = read_checkpoint_manifest(directory)
    _refuse_stranger(trainer, directory, manifest)
    # Every rank reads the sizes; the bytes are hashed once.
    verify_checkpoint(directory, manifest, with_hashes=trainer.world.at.rank == 0)
    if trainer.config.megatron.megatron_use_distributed_optimizer:
        _prime_adam(trainer.optimizer)
        _repair_distributed_load()
    state = dist_checkpointing.load(_sharded_state(trainer, is_loading=True), str(directory))
    trainer.model.module.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    _unshare_steps(trainer.optimizer)
    progress = trainer.learner.progress
    progress.step = manifest.step
    progress.num_optimizer_steps = manifest.num_optimizer_steps
    progress.num_skipped_in_a_row = manifest.num_skipped_in_a_row
    barrier(trainer.world)


def _keep_results_in_process() -> None:
    # Megatron would start a manager process to carry the names of the written files from a writer
    # process; a synchronous save writes in threads, and the manager would outlive a killed rank.
    filesystem_async._results_queue = queue.Queue()  # noqa: SLF001


def _sharded_state(trainer: Trainer, *, is_loading: bool) -> dict[str, Any]:
    model_state = trainer.model.module.sharded_state_dict()
    optimizer_state = trainer.optimizer.sharded_state_dict(
        {"model": model_state}, is_loading=is_loading, metadata=OPTIMIZER_METADATA
    )
    return {"model": model_state, "optimizer": optimizer_state}


def _make_room(partial: Path, final: Path) -> None:
    if final.exists():
        raise FileExistsError(f"{final} exists already")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _manifest(trainer: Trainer, directory: Path) -> CheckpointManifest:
    progress, sizes = trainer.learner.progress, trainer.world.sizes
    return CheckpointManifest(
        format=CHECKPOINT_FORMAT,
        step=progress.step,
        num_optimizer_steps=progress.num_optimizer_steps,
        num_skipped_in_a_row=progress.num_skipped_in_a_row,
        architecture_hash=trainer.architecture.hash,
        reference_hash=trainer.reference_hash,
        layout=TrainerLayout(
            world_size=trainer.world.size,
            tensor=sizes.tensor,
            pipeline=sizes.pipeline,
            context=sizes.context,
            expert=sizes.expert,
            has_distributed_optimizer=trainer.config.megatron.megatron_use_distributed_optimizer,
        ),
        files=tuple(file_entry(path) for path in sorted(directory.iterdir())),
    )


def _refuse_stranger(trainer: Trainer, directory: Path, manifest: CheckpointManifest) -> None:
    if manifest.architecture_hash != trainer.architecture.hash:
        raise DataError(f"{directory}: a checkpoint of another model than model_path names")
    has_distributed = trainer.config.megatron.megatron_use_distributed_optimizer
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
    if trainer.reference_hash and manifest.reference_hash not in {None, trainer.reference_hash}:
        raise DataError(
            f"{directory}: the run's KL reference has changed: model_path holds weights "
            f"{trainer.reference_hash}, the checkpoint was trained against "
            f"{manifest.reference_hash}"
        )


def _prime_adam(optimizer: Any) -> None:
    """Give AdamW the state that Megatron expects to find before it loads into it."""
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter.data)
                    state["exp_avg_sq"] = torch.zeros_like(parameter.data)


def _unshare_steps(optimizer: Any) -> None:
    # Megatron hands every parameter the same `step` tensor, which AdamW then raises once per
    # parameter: updates that are silently wrong from the second step on.
    for inner in torch_optimizers(optimizer):
        for parameter, state in inner.state.items():
            if torch.is_tensor(state.get("step")):
                # Beside its parameter, where the fused kernel reads it.
                state["step"] = state["step"].clone().to(parameter.device)


def _repair_distributed_load() -> None:
    """Let Megatron 0.19.2 load torch's AdamW, which it assumes to be Transformer Engine's.

    Its setter looks for a `step` among the saved tensors, where the common step is stored apart,
    and copies in place into leaves that require gradients.
    """
    original = DistributedOptimizer._set_main_param_and_optimizer_states  # noqa: SLF001
    if getattr(original, "is_repaired", False):
        return

    def repaired(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        parameter = self.optimizer.param_groups[group]["params"][order]
        expected = dict.fromkeys(self.optimizer.state[parameter])
        given = {name: tensor for name, tensor in tensors.items() if name != "step"}
        with torch.no_grad():
            original(self, model_param, expected | given)

    repaired.is_repaired = True  # type: ignore[attr-defined]
    DistributedOptimizer._set_main_param_and_optimizer_states = repaired  # noqa: SLF001
