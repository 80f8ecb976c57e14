"""Model and optimizer to and from Megatron's distributed checkpoints: any layout reads any other's.

A save has two parts: `stage` takes the state into host memory and has the ranks agree on who writes
what; `StagedState` writes it, in any thread, while the model trains on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.planner import WriteItemType

from libra.errors import InvariantError
from libra.storage.arrival import check_written, until_visible
from libra.trainer import optimizer_gather
from libra.trainer.host_memory import ALIGNMENT, Arena, HostMemory, with_own_storage
from libra.trainer.model import bare
from libra.trainer.optimizer import has_torch_adam, torch_optimizers

# The only form that other layouts can load. It is safe because the model has one gradient bucket:
# with several, padded bucket ends silently corrupt it (megatron-core 0.19.2).
OPTIMIZER_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    # Gathered to the one data-parallel rank that writes it.
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


EXTRA: Final = "_extra_state"


class StagedState:
    """One rank's part of a checkpoint, in host memory."""

    def __init__(self, directory: Path, writer: "_Writer", metadata: Any) -> None:
        """`metadata` is of the whole, on rank 0."""
        self._directory = directory
        self._writer = writer
        self._metadata = metadata

    def write(self, *, is_durable: bool) -> list[Any]:
        """Write this rank's files; returns what `finish` wants of every rank. Raises OSError."""
        results: list[Any] = []
        try:
            for path, key, (objects, tensors) in self._writer.write_buckets:
                bucket = path, key, (objects, _ready_to_write(tensors))
                _, written = FileSystemWriterAsync.write_preloaded_data(
                    [self._writer.transforms], 0, bucket, None, None, use_fsync=is_durable
                )
                if isinstance(written, Exception):
                    raise _of_the_disk(written, path) from written
                results += written
        finally:
            self._writer.write_buckets = []
            self._writer.arena.give_back()
        return results

    def finish(self, results: list[list[Any]]) -> None:
        """On rank 0, when every rank has written: the index over all ranks' files.

        Raises NotVisibleYetError when files of ranks on other hosts do not come into sight.
        """
        until_visible(lambda: check_written(self._directory, _ends(results)))
        self._writer.finish(self._metadata, results)
        strategy = TorchDistSaveShardedStrategy()
        save_config(CheckpointingConfig(strategy.backend, strategy.version), str(self._directory))


def _of_the_disk(error: Exception, path: str) -> Exception:
    """What the disk said: torch ends its file first, in vain, and says only where that was.

    An error that has nothing of the disk in it is a bug, and stays what it is.
    """
    said: BaseException | None = error
    while said is not None and not isinstance(said, OSError):
        said = said.__cause__ or said.__context__
    return error if said is None else OSError(f"cannot write {path}: {said}")


def _ends(results: list[list[Any]]) -> dict[str, int]:
    """Where the last byte of every file lies that the ranks say they have written."""
    end_of: dict[str, int] = {}
    for written in (result.storage_data for of_rank in results for result in of_rank):
        end = written.offset + written.length
        end_of[written.relative_path] = max(end_of.get(written.relative_path, 0), end)
    return end_of


def stage(model: Any, optimizer: Any, directory: Path, host_memory: HostMemory) -> StagedState:
    """Take the state of all ranks as it is now; every rank takes part. `directory` is empty."""
    arena = host_memory.take()
    optimizer_gather.install(empty=lambda count: arena.empty((count,), torch.float32))
    strategy = _Staging(directory)
    with _writing_from(arena):
        dist_checkpointing.save(
            _sharded_state(model, optimizer, is_loading=False),
            str(directory),
            strategy,
            async_sharded_save=True,
            async_strategy="mcore",
        )
    return strategy.staged


def num_state_bytes(model: Any, *, has_main_weights: bool) -> int:
    """Of host memory that `stage` needs on this rank, about.

    `has_main_weights`: the optimizer saves weights of its own beside the model's.
    """
    in_optimizer = (3 if has_main_weights else 2) * torch.float32.itemsize
    return sum(
        parameter.nbytes + parameter.numel() * in_optimizer + 4 * ALIGNMENT
        for parameter in model.parameters()
        if _is_written_here(parameter)
    )


def _is_written_here(parameter: torch.nn.Parameter) -> bool:
    """The first of the ranks that hold the same saves it."""
    if getattr(parameter, "allreduce", True):
        return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)
    return bool(parallel_state.get_expert_data_parallel_rank() == 0)


def restore(
    model: Any, optimizer: Any, directory: Path, *, has_distributed_optimizer: bool
) -> None:
    """Load what `stage` took, on this layout; every rank takes part."""
    if has_distributed_optimizer and has_torch_adam():
        _prime_adam(optimizer)
        _repair_distributed_load()
    state = dist_checkpointing.load(
        _sharded_state(model, optimizer, is_loading=True), str(directory)
    )
    _load_model(model, state["model"])
    _load_optimizer(optimizer, state["optimizer"])
    _unshare_steps(optimizer)


def restore_weights(model: Any, directory: Path) -> None:
    """Load the model alone, whatever optimizer it was saved with."""
    wanted = {"model": _model_state(model)}
    state = dist_checkpointing.load(wanted, str(directory))
    _load_model(model, state["model"])


def _model_state(model: Any) -> dict[str, Any]:
    """Without what Transformer Engine keeps for 8-bit types, so that other layers can read it."""
    state = model.module.sharded_state_dict()
    return {name: part for name, part in state.items() if EXTRA not in name}


def _load_model(model: Any, state: dict[str, Any]) -> None:
    result = bare(model).load_state_dict(state, strict=False)
    names = [*result.missing_keys, *result.unexpected_keys]
    if others := [name for name in names if EXTRA not in name]:
        raise InvariantError(f"the checkpoint and the model differ in {', '.join(others)}")


def _load_optimizer(optimizer: Any, state: Any) -> None:
    """Take main weights, moments and steps; hyper-parameters stay those it was built with."""
    settings = _settings(optimizer)
    parts = optimizer.chained_optimizers
    states = [state] if len(parts) == 1 else [state[index] for index in range(len(parts))]
    for part, of_part in zip(parts, states, strict=True):
        for group in of_part.get("optimizer", of_part).get("param_groups", ()):
            # Megatron finds a group by its peak rate too, and knows none that has changed.
            group["max_lr"] = part.config.lr
    optimizer.load_state_dict(state)
    for group, kept in zip(_groups(optimizer), settings, strict=True):
        group.update(kept)


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    """All that a group says of how to step; Transformer Engine's keeps the step itself there."""
    return [
        {name: value for name, value in group.items() if name not in {"params", "step"}}
        for group in _groups(optimizer)
    ]


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [group for inner in torch_optimizers(optimizer) for group in inner.param_groups]


class _Staging(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's own strategy, stopped where it would hand its plan to a writer process."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self.finalize_fns: list[Any] = []
        """Megatron appends to it; what it would do is in `StagedState.finish`."""

    def _get_save_and_finalize_callbacks(
        self, writer: Any, save_state_dict_ret: Any, _async_strategy: Any
    ) -> "_Staging":
        self.staged = StagedState(self._directory, writer, save_state_dict_ret[1])
        return self


class _Writer(FileSystemWriterAsync):  # type: ignore[misc]
    """Copies once what later steps would change.

    Megatron's copies again on the host what was gathered there, and starts a manager process for
    writers that are processes; ours is a thread.
    """

    def __init__(self, arena: Arena, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.arena = arena

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        """Set `write_buckets`: (path, name, (objects, tensors)) of each file of this rank."""
        objects = [it for it in plan.items if it.type == WriteItemType.BYTE_IO]
        tensors = [it for it in plan.items if it.type != WriteItemType.BYTE_IO]
        if not plan.items:
            self.write_buckets = []
            return
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        content = (
            [(item, planner.resolve_data(item)) for item in objects],
            [(item, self._taken(planner.resolve_data(item))) for item in tensors],
        )
        self.write_buckets = [(str(Path(self.checkpoint_dir) / name), name, content)]

    def _taken(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.arena.has(tensor) else self.arena.copy_of(tensor)


@contextmanager
def _writing_from(arena: Arena) -> Iterator[None]:
    """Megatron, which has no place for a writer of its user's, makes ours."""
    filesystem_async.FileSystemWriterAsync = partial(_Writer, arena)
    try:
        yield
    finally:
        filesystem_async.FileSystemWriterAsync = FileSystemWriterAsync


def _ready_to_write(tensors: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    return ((item, with_own_storage(tensor)) for item, tensor in tensors)


def _sharded_state(model: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    model_state = _model_state(model)
    optimizer_state = optimizer.sharded_state_dict(
        {"model": model_state}, is_loading=is_loading, metadata=OPTIMIZER_METADATA
    )
    return {"model": model_state, "optimizer": optimizer_state}


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
