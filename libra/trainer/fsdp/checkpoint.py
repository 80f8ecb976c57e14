"""Model and optimizer to and from torch's distributed checkpoints: any number of ranks reads any.

A tensor is stored by its parameter's name behind `model.`, `exp_avg.`, `exp_avg_sq.` or `step.`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from libra.errors import DataError
from libra.trainer.host_memory import Arena, HostMemory

OF_OPTIMIZER: Final = ("exp_avg", "exp_avg_sq", "step")


class StagedState:
    """Copies of one rank's shards, in host memory."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        directory: Path,
        files_group: Any,
        host_memory: HostMemory,
    ) -> None:
        mesh = DeviceMesh.from_group(files_group, "cpu")
        self._arena = host_memory.take()
        self._tensors = {
            name: _copied(tensor, mesh, self._arena) for name, tensor in tensors.items()
        }
        self._directory = directory
        self._files_group = files_group

    def write(self, *, is_durable: bool) -> list[Any]:
        """Write all ranks' files: the ranks agree here on what each of them writes."""
        writer = FileSystemWriter(self._directory, single_file_per_rank=True, sync_files=is_durable)
        try:
            save(self._tensors, storage_writer=writer, process_group=self._files_group)
        except CheckpointException as error:
            raise OSError(str(error)) from error
        finally:
            self._tensors = {}
            self._arena.give_back()
        return []

    def finish(self, results: list[list[Any]]) -> None:
        """Nothing is left to do: the index was written with the files."""


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that a step changes, sharing memory with model and optimizer."""
    state = weights_of(model)
    for name, parameter in model.named_parameters():
        for kind in OF_OPTIMIZER:
            state[f"{kind}.{name}"] = optimizer.state[parameter][kind]
    return state


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"model.{name}": p.detach() for name, p in model.named_parameters()}


def restore(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """Read into `tensors`, whatever number of ranks wrote them. Raises DataError."""
    try:
        load(tensors, storage_reader=FileSystemReader(directory))
    except CheckpointException as error:
        raise DataError(f"{directory}: {error}") from error


def _copied(tensor: torch.Tensor, mesh: DeviceMesh, arena: Arena) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return arena.copy_of(tensor)
    shard = arena.copy_of(tensor.to_local())
    # Shards of uneven length do not tell the whole shape.
    return DTensor.from_local(
        shard, mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )
