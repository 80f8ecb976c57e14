"""Weights from Hugging Face safetensors into this rank's model, and back, one tensor at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import safe_open

from libra.errors import DataError, InvariantError
from libra.storage.safetensors import model_tensors
from libra.trainer.architecture import Architecture
from libra.trainer.backend import Beat
from libra.trainer.model import bare
from libra.trainer.tensor_map import (
    Rule,
    cut,
    embedding_rule,
    final_norm_rule,
    join,
    layer_rules,
    mend,
    model_rules,
    name_in_rules,
    output_rule,
    separate,
)
from libra.trainer.world import World

NAMES_IN_A_MESSAGE = 5


def load_hf_weights(
    model: torch.nn.Module, architecture: Architecture, directory: Path, world: World
) -> None:
    """Set every parameter of this rank's `model` from the safetensors files in `directory`.

    Raises DataError naming the tensors that are missing, too many or of another shape, before
    anything is set.
    """
    file_of = _checked_files(architecture, directory)
    parameters = local_parameters(model, architecture, world)
    with torch.no_grad(), _OpenFiles(directory) as files:
        for rule, parameter in parameters:
            sources = [files.tensor(file_of[s.name], s.name) for s in rule.sources]
            whole = join(rule, sources, architecture, world.sizes.tensor)
            part = cut(rule, whole, size=world.sizes.tensor, index=world.at.tensor)
            if part.shape != parameter.shape:
                raise InvariantError(
                    f"{rule.parameter}: {tuple(part.shape)} made for {tuple(parameter.shape)}"
                )
            parameter.copy_(part)


def local_parameters(
    model: torch.nn.Module, architecture: Architecture, world: World
) -> list[tuple[Rule, torch.nn.Parameter]]:
    """Pair rule and parameter of everything this rank holds, in the order of the model.

    Raises InvariantError when the rules and the model do not cover each other.
    """
    gpt = bare(model)
    rules = _rules_here(gpt, architecture, world)
    first_expert = _experts_here(architecture, world).start
    layers = [layer.layer_number - 1 for layer in gpt.decoder.layers]
    parameters = {
        name_in_rules(name, layers=layers, first_expert=first_expert): parameter
        for name, parameter in gpt.named_parameters()
    }
    if difference := parameters.keys() ^ {rule.parameter for rule in rules}:
        raise InvariantError(f"no rule, or no parameter, for {_some(difference)}")
    return [(rule, parameters[rule.parameter]) for rule in rules]


def _rules_here(gpt: Any, architecture: Architecture, world: World) -> list[Rule]:
    rules = [embedding_rule(architecture)] if world.is_first_stage else []
    for layer in gpt.decoder.layers:
        rules += layer_rules(architecture, layer.layer_number - 1)
    experts = _experts_here(architecture, world)
    rules = [rule for rule in rules if rule.expert is None or rule.expert in experts]
    if world.is_last_stage:
        rules.append(final_norm_rule(architecture))
        # On one stage a tied head is the embedding itself; on several it is a copy.
        if not (architecture.has_tied_embeddings and world.is_first_stage):
            rules.append(output_rule(architecture))
    return rules


def _experts_here(architecture: Architecture, world: World) -> range:
    """Return the experts of this rank, in the model's numbering; empty without experts."""
    if architecture.experts is None:
        return range(0)
    count = architecture.experts.num_experts // world.sizes.expert
    return range(world.at.expert * count, (world.at.expert + 1) * count)


def _checked_files(architecture: Architecture, directory: Path) -> dict[str, str]:
    """File of each tensor, after comparing names and shapes with what the architecture needs."""
    found = {tensor.name: tensor for tensor in model_tensors(directory)}
    needed = {s.name: s.shape for rule in model_rules(architecture) for s in rule.sources}
    if missing := needed.keys() - found.keys():
        raise DataError(f"{directory}: tensors are missing: {_some(missing)}")
    extra = {name for name in found.keys() - needed.keys() if not name.endswith("inv_freq")}
    if architecture.has_tied_embeddings:
        extra.discard("lm_head.weight")
    if extra:
        raise DataError(f"{directory}: tensors that the model does not have: {_some(extra)}")
    wrong = [
        f"{name} is {found[name].shape} instead of {shape}"
        for name, shape in needed.items()
        if found[name].shape != shape
    ]
    if wrong:
        raise DataError(f"{directory}: {'; '.join(wrong[:NAMES_IN_A_MESSAGE])}")
    return {name: found[name].file for name in needed}


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:NAMES_IN_A_MESSAGE])
    return shown if len(names) <= NAMES_IN_A_MESSAGE else f"{shown} and {len(names)} in all"


class _OpenFiles:
    """Memory maps of a directory's safetensors files, opened as they are needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._handle_of: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle_of.clear()

    def tensor(self, file: str, name: str) -> torch.Tensor:
        if file not in self._handle_of:
            self._handle_of[file] = safe_open(self._directory / file, framework="pt")
        tensor: torch.Tensor = self._handle_of[file].get_tensor(name)
        return tensor


def gather_hf_tensors(
    model: torch.nn.Module, architecture: Architecture, world: World, *, beat: Beat, to_cpu: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the whole model on rank 0; nothing on other ranks.

    Every rank must run it to the end. One parameter is in flight at a time, so rank 0 needs room
    for the largest one only. Order and names are those of `model_rules`.
    """
    layers_per_stage = architecture.num_layers // world.sizes.pipeline
    here = {rule.parameter: p for rule, p in local_parameters(model, architecture, world)}
    dtype = next(model.parameters()).dtype
    for rule in model_rules(architecture):
        beat()
        stage = _stage_of(rule, layers_per_stage, world.sizes.pipeline)
        owner = _first_owner(rule, stage, architecture, world)
        tensors: list[torch.Tensor] = []
        if world.at.rank // world.sizes.tensor == owner // world.sizes.tensor:
            whole = _mended(rule, here[rule.parameter], world)
            tensors = [t.contiguous() for t in separate(rule, whole, architecture)]
        if owner:
            tensors = _moved_to_rank_0(tensors, rule, world, source_rank=owner, dtype=dtype)
        if world.at.rank == 0:
            given = (t.cpu() for t in tensors) if to_cpu else tensors
            yield from zip((s.name for s in rule.sources), given, strict=True)


def _stage_of(rule: Rule, layers_per_stage: int, num_stages: int) -> int:
    if rule.parameter.startswith("embedding."):
        return 0
    if rule.parameter.startswith("decoder.layers."):
        return int(rule.parameter.split(".")[2]) // layers_per_stage
    return num_stages - 1


def _first_owner(rule: Rule, stage: int, architecture: Architecture, world: World) -> int:
    """Return the lowest rank that holds a slice of the rule's parameter; its slice is the first."""
    replica = 0
    if rule.expert is not None and architecture.experts is not None:
        replica = rule.expert * world.sizes.expert // architecture.experts.num_experts
    replicas_per_stage = world.sizes.context * world.sizes.data
    return world.sizes.tensor * (replicas_per_stage * stage + replica)


def _mended(rule: Rule, parameter: torch.nn.Parameter, world: World) -> torch.Tensor:
    own = parameter.detach().contiguous()
    slices = [torch.empty_like(own) for _ in range(world.sizes.tensor)]
    dist.all_gather(slices, own, group=world.tensor_group)
    return mend(rule, slices)


def _moved_to_rank_0(
    tensors: list[torch.Tensor], rule: Rule, world: World, *, source_rank: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    if world.at.rank == source_rank:
        for tensor in tensors:
            dist.send(tensor, dst=0)
        return []
    if world.at.rank:
        return []
    received = [torch.empty(s.shape, dtype=dtype, device=world.device) for s in rule.sources]
    for tensor in received:
        dist.recv(tensor, src=source_rank)
    return received
