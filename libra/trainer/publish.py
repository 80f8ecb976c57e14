"""Weights of the current policy as a directory that vLLM and transformers can load."""

import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch

from libra import clock
from libra.errors import InvariantError, SiteError
from libra.storage.atomic import growing_directory
from libra.storage.digest import file_entry
from libra.storage.manifests import write_manifest
from libra.storage.safetensors import BITS_OF_DTYPE, write_index, write_safetensors
from libra.trainer.assembly import Trainer
from libra.trainer.backend import HfTensor
from libra.trainer.probe import PROBE_NAME, Probe, probe_logprobs
from libra.weights.manifest import FORMAT, FileEntry, TensorEntry, WeightsManifest
from libra.wire.rank import ExportWeights, WeightsExported

MAX_FILE_BYTES = 4 << 30
SAFETENSORS_DTYPE = {torch.float32: "F32", torch.bfloat16: "BF16"}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def export_weights(trainer: Trainer, command: ExportWeights) -> WeightsExported | None:
    """Write the weights, a probe and, last, the manifest; every rank takes part.

    Returns what to announce on rank 0, None elsewhere. Raises SiteError when the directory exists
    already or cannot be written; then nothing of it is left.
    """
    began_at = clock.monotonic()
    probe = Probe(
        token_ids=command.probe_token_ids,
        logprobs=probe_logprobs(trainer, command.probe_token_ids),
    )
    tensors = trainer.backend.hf_tensors(beat=lambda: trainer.learner.beat("export"))
    if trainer.world.at.rank:
        for _ in tensors:
            raise InvariantError("only rank 0 may be given whole tensors")
        return None
    directory = Path(command.directory)
    try:
        with growing_directory(directory, is_durable=command.is_durable) as partial:
            manifest_hash = _write(trainer, command, probe, tensors, partial)
    except OSError as error:
        raise SiteError(f"weights v{command.policy_version}: {error}") from error
    return WeightsExported(
        policy_version=command.policy_version,
        directory=command.directory,
        manifest_hash=manifest_hash,
        probe_logprobs=probe.logprobs,
        export_s=clock.monotonic() - began_at,
    )


def _write(
    trainer: Trainer,
    command: ExportWeights,
    probe: Probe,
    tensors: Iterator[tuple[str, torch.Tensor]],
    directory: Path,
) -> str:
    dtype = trainer.backend.export_dtype
    entries, files = _write_tensors(trainer.backend.export_plan, dtype, tensors, directory)
    written = [
        _write_config(trainer, dtype, directory),
        *_copy_companions(trainer, directory),
        directory / PROBE_NAME,
    ]
    (directory / PROBE_NAME).write_bytes(msgspec.json.encode(probe))
    if len(files) > 1:
        write_index(directory, entries)
        written.append(directory / "model.safetensors.index.json")
    manifest = WeightsManifest(
        format=FORMAT,
        run_id=command.run_id,
        policy_version=command.policy_version,
        tied_embeddings=trainer.backend.has_tied_embeddings,
        files=(*files, *(file_entry(path) for path in written)),
        tensors=tuple(entries),
    )
    return write_manifest(directory, manifest)


def _write_tensors(
    plan: Sequence[HfTensor],
    dtype: torch.dtype,
    tensors: Iterator[tuple[str, torch.Tensor]],
    directory: Path,
) -> tuple[list[TensorEntry], list[FileEntry]]:
    planned = plan_files(plan, SAFETENSORS_DTYPE[dtype], max_file_bytes=MAX_FILE_BYTES)
    files = [
        write_safetensors(
            directory / entries[0].file,
            entries,
            (_content(*pair) for pair in zip(entries, islice(tensors, len(entries)), strict=True)),
        )
        for entries in planned
    ]
    # The generator has collectives after its last tensor in other ranks' eyes: run it to its end.
    if next(tensors, None) is not None:
        raise InvariantError("more tensors were gathered than were planned")
    return [entry for entries in planned for entry in entries], files


def plan_files(
    plan: Sequence[HfTensor], dtype: str, *, max_file_bytes: int
) -> list[list[TensorEntry]]:
    """Group the tensors, in the order of export, into files of bounded size."""
    groups: list[list[HfTensor]] = [[]]
    room = max_file_bytes
    for source in plan:
        num_bytes = prod(source.shape) * BITS_OF_DTYPE[dtype] // 8
        if num_bytes > room and groups[-1]:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(source)
        room -= num_bytes
    names = (
        ["model.safetensors"]
        if len(groups) == 1
        else [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    )
    return [
        [TensorEntry(name=name, dtype=dtype, shape=shape, file=file) for name, shape in group]
        for file, group in zip(names, groups, strict=True)
    ]


def _content(entry: TensorEntry, gathered: tuple[str, torch.Tensor]) -> memoryview:
    name, tensor = gathered
    if name != entry.name:
        raise InvariantError(f"gathered {name} where {entry.name} was planned")
    content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


def _write_config(trainer: Trainer, dtype: torch.dtype, directory: Path) -> Path:
    """config.json of the base model with the dtype that the tensors have now."""
    source = Path(trainer.config.model.model_path) / "config.json"
    config: dict[str, Any] = msgspec.json.decode(source.read_bytes())
    name = str(dtype).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    path = directory / "config.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config | dict.fromkeys(keys, name))))
    return path


def _copy_companions(trainer: Trainer, directory: Path) -> Sequence[Path]:
    model = trainer.config.model
    tokenizer_path = Path(model.resolved_tokenizer_path)
    sources = [Path(model.model_path) / "generation_config.json"]
    sources += [tokenizer_path / name for name in TOKENIZER_FILES]
    copies = [directory / source.name for source in sources if source.is_file()]
    for source in sources:
        if source.is_file():
            shutil.copyfile(source, directory / source.name)
    return copies
