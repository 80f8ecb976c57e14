"""Models on Transformer Engine's layers against the same on Megatron's own, on one GPU.

    engine_layers.py OUT

Needs CUDA and Transformer Engine. Prints one JSON object per check and ends with an error when one
is off.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support"), str(ROOT / "tests/system/trainer")]

from trainer_checks import relative, report  # noqa: E402 - after the path is set

KINDS = {
    "qwen2": {},
    "qwen2_tied": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_moe, grouped": {"megatron_grouped_gemm": True},
}
VARIANTS = {
    "plain": {},
    "distributed": {"megatron_use_distributed_optimizer": True},
    "experts, grouped": {"megatron_grouped_gemm": True},
    "precise": {
        "megatron_use_distributed_optimizer": True,
        "megatron_use_precision_aware_optimizer": True,
    },
}

NUM_STEPS = 3
ROUGH = 2e-2
"""Of bfloat16, whose last bit is 4e-3."""


def main() -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29513")
    from tiny_models import KINDS as MODELS
    from tiny_models import WITH_EXPERTS, make_tiny_model
    from trainer_ranks import joined_world, run_config

    out = Path(sys.argv[1])
    models = out / "engine-models"
    for kind in MODELS | WITH_EXPERTS:
        if not (models / kind).exists():
            make_tiny_model(models / kind, kind)
    with joined_world(run_config(models / "qwen2", device="cuda")) as world:
        for name, options in KINDS.items():
            check_kind(models / name.partition(",")[0], name, options, world)
        check_checkpoints(models, out / "engine-saved", world)


@contextmanager
def without_engine() -> Iterator[None]:
    """Models built here are of Megatron's own layers."""
    import libra.trainer.model as builder

    with patch.object(builder, "uses_transformer_engine", lambda *_, **__: False):
        yield


def check_kind(model: Path, name: str, options: dict[str, object], world) -> None:
    import torch
    from safetensors.torch import load_file

    from libra.trainer.model import bare

    given = {"train_dtype": "bfloat16", "entropy_coefficient": 0.01} | options
    trainer = built(model, world, **given)
    classes = {type(module).__name__ for module in bare(trainer.backend.model).modules()}
    assert any(it.startswith("TE") for it in classes), classes
    assert ("TEGroupedMLP" in classes) == bool(options), classes
    original = load_file(model / "model.safetensors")
    gathered = dict(trainer.backend.hf_tensors(beat=lambda: None))
    assert gathered.keys() == original.keys()
    for tensor_name, tensor in gathered.items():
        assert torch.equal(tensor, original[tensor_name].to(tensor.dtype)), tensor_name
    found = {"engine": learned(trainer)}
    with without_engine():
        found["own"] = learned(built(model, world, **given))
        found["float32"] = learned(built(model, world, **given | {"train_dtype": "float32"}))
    wanted = torch.tensor(found.pop("float32"))
    differences = {it: relative(torch.tensor(steps), wanted) for it, steps in found.items()}
    report(f"learning of {name}", differences, ROUGH)


def built(model: Path, world, **options):
    from libra.trainer.assembly import assemble
    from trainer_ranks import no_beat, run_config

    config = run_config(model, device="cuda", micro_batch_size=5, **options)
    return assemble(config, world, beat=no_beat)


def learned(trainer) -> list[tuple[float, ...]]:
    from trainer_ranks import make_samples, train_step

    steps = []
    for step in range(1, NUM_STEPS + 1):
        samples = make_samples(step, 16, trainer.backend.vocab_size)
        command = train_step(step, [samples[:8], samples[8:]], dp_rank=0, dp_size=1)
        metrics = trainer.learner.train(command)
        steps.append((metrics.loss, metrics.grad_norm, metrics.entropy, metrics.kl_mismatch))
    return steps


def check_checkpoints(models: Path, saved: Path, world) -> None:
    """Each kind of layers reads its own to the last bit, and the other's as far as it rounds."""
    for name, options in VARIANTS.items():
        model = models / ("qwen3_moe" if "experts" in name else "qwen2")
        wanted = went_on(model, options, world, saved / name, "save")
        found = {"own": relative(went_on(model, options, world, saved / name, "restore"), wanted)}
        report(f"a checkpoint, {name}", found, 1e-6)
        if "precise" in name:
            continue
        with without_engine():
            wanted_there = went_on(model, options, world, saved / f"{name}, plain", "save")
            there = went_on(model, options, world, saved / name, "restore")
        here = went_on(model, options, world, saved / f"{name}, plain", "restore")
        found = {"to": relative(there, wanted), "from": relative(here, wanted_there)}
        report(f"a checkpoint and the other layers, {name}", found, ROUGH)


def went_on(model: Path, options: dict[str, object], world, directory: Path, action: str):
    """Float64[steps, 3] of the steps after the one that is saved."""
    import torch
    from check_resume import BASE, go_on

    from trainer_ranks import run_config

    given = BASE | {"device": "cuda", "train_dtype": "bfloat16"} | options
    steps = go_on(run_config(model, **given), world, directory, action)
    return torch.tensor([(it["loss"], it["grad_norm"], it["entropy"]) for it in steps])


if __name__ == "__main__":
    main()
