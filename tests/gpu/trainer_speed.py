"""One trainer rank (or several under torchrun) on synthetic trajectories; prints JSON lines.

    trainer_speed.py OUT --shape 0.5b|1.8b [--micro 16 64] [--layouts packed padded] [--bare] ...

Makes a model with random weights under OUT. For each variant: tokens per second and model FLOP
utilisation of a whole GRPO step, its parts, the peak of memory; with --bare the same model and
token count through plain next-token training, in the same process, as the peer; with --publish the
times of an export and of a checkpoint. Needs CUDA.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
from engine_layers import without_engine

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

SHAPES = {
    "tiny": (2, 256, 4, 2, 512, 1024),
    "0.5b": (24, 896, 14, 2, 4864, 151936),
    "1.8b": (28, 1536, 12, 2, 8960, 151936),
}
"""Layers, hidden size, heads, key-value heads, feed-forward size, vocabulary."""

PEAK_FLOPS = 989e12
WARM_UP, MEASURED = 2, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--length", type=int, nargs=2, default=(200, 600))
    parser.add_argument("--micro", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--layouts", nargs="+", default=["packed"])
    parser.add_argument(
        "--layers",
        nargs="+",
        default=["usual"],
        choices=("usual", "own"),
        help="usual: Transformer Engine's where it is installed; own: without it",
    )
    parser.add_argument("--logit-rows", type=int, default=8)
    parser.add_argument("--mini-batches", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--threads", type=int, default=8, help="as a rank has beside a GPU")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--publish", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("-o", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    model_path = options.out / f"model-{options.shape}"
    if os.environ["RANK"] == "0":
        make_model(model_path, options.shape)
    run(model_path, options)


def make_model(directory: Path, shape: str) -> None:
    import torch

    from tiny_models import make_tiny_model

    if (directory / "config.json").exists():
        return
    layers, hidden, heads, kv_heads, ffn, vocab = SHAPES[shape]
    shutil.rmtree(directory, ignore_errors=True)
    with torch.no_grad():
        make_tiny_model(
            directory,
            "qwen2_tied",
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=ffn,
            vocab_size=vocab,
            max_position_embeddings=8192,
        )


def run(model_path: Path, options: argparse.Namespace) -> None:
    import torch

    from trainer_ranks import joined_world, run_config

    overrides = dict(pair.split("=", 1) for pair in options.overrides)
    settings = {key: json.loads(value) for key, value in overrides.items()}
    base = {
        "device": "cuda",
        "train_dtype": "bfloat16",
        "train_tp_size": options.tp,
        "batch_size": options.trajectories,
        "mini_batch_size": options.trajectories // options.mini_batches,
        "recompute_micro_batch_size": options.logit_rows,
        "learning_rate": 1e-6,
        "megatron_use_distributed_optimizer": True,
        "megatron_use_cpu_initialization": False,
    } | settings
    with joined_world(run_config(model_path, **base)) as world:
        torch.set_num_threads(options.threads)
        steps = [batches(step, options, world) for step in range(1, WARM_UP + MEASURED + 2)]
        for made_of, layout, micro in product(options.layers, options.layouts, options.micro):
            config = run_config(model_path, **base | {"micro_batch_size": micro})
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            with without_engine() if made_of == "own" else nullcontext():
                result = measure(config, world, layout, steps, options)
            report(world, {"variant": f"{made_of} layers, {layout} micro {micro}", **result})
        if options.bare:
            for micro in options.micro:
                config = run_config(model_path, **base | {"micro_batch_size": micro})
                report(world, {"variant": f"bare micro {micro}", **bare(config, world, steps)})


def batches(step: int, options: argparse.Namespace, world):
    from libra.wire.rank import Sample
    from trainer_ranks import train_step

    rng = np.random.default_rng(step)
    vocab = SHAPES[options.shape][-1]
    samples = []
    for index in range(options.trajectories):
        length = int(rng.integers(*options.length))
        mask = np.ones(length, np.uint8)
        mask[: length // 5] = 0
        samples.append(
            Sample(
                trajectory_id=str(index),
                token_ids=rng.integers(0, vocab, length, dtype=np.int32).tobytes(),
                loss_mask=mask.tobytes(),
                rollout_logprobs=np.full(length, -12.0, np.float32).tobytes(),
                advantage=float(rng.normal()),
            )
        )
    size = options.trajectories // options.mini_batches
    parts = [samples[at : at + size] for at in range(0, len(samples), size)]
    return train_step(step, parts, dp_rank=world.at.data, dp_size=world.sizes.data)


def measure(config, world, layout, steps, options) -> dict[str, object]:
    from libra.trainer.assembly import assemble

    trainer = assemble(config, world, beat=lambda *_: None, layout=layout)
    if options.publish:
        trainer.backend.prepare_to_stage()
    found = []
    wall_s = median_s(lambda number: found.append(trainer.learner.train(steps[number])))
    result = rates(trainer, lengths_of(steps[-1]), wall_s, world)
    result["recompute_s"] = round(statistics.median(m.recompute_s for m in found[WARM_UP:]), 3)
    result |= {"loss": found[0].loss, "grad_norm": found[0].grad_norm}
    if options.profile:
        profiled(lambda: trainer.learner.train(steps[-1]), world)
    if options.publish:
        result |= published(trainer, options.out / "published")
    return result


def rates(trainer, lengths: list[int], wall_s: float, world) -> dict[str, object]:
    """Of a step over sequences of these lengths on each data-parallel rank."""
    import torch

    architecture, copies = trainer.backend.architecture, world.sizes.data
    tokens = sum(lengths) * copies
    parameters = trainer.backend.num_parameters * world.sizes.tensor
    attention = 6 * architecture.num_layers * architecture.num_heads * architecture.head_dim
    flops = 6 * parameters * tokens + attention * sum(n**2 for n in lengths) * copies
    return {
        "step_s": round(wall_s, 4),
        "tokens": tokens,
        "tokens_per_s_per_gpu": round(tokens / wall_s / world.size),
        "mfu": round(flops / wall_s / world.size / PEAK_FLOPS, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def lengths_of(command) -> list[int]:
    return [len(s.token_ids) // 4 for m in command.mini_batches for s in m.samples]


def median_s(step: Callable[[int], object]) -> float:
    """Median seconds of `step(number)` after the warm-up."""
    import torch

    walls = []
    for number in range(WARM_UP + MEASURED):
        torch.cuda.synchronize()
        began_at = time.perf_counter()
        step(number)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - began_at)
    return statistics.median(walls[WARM_UP:])


def published(trainer, directory: Path) -> dict[str, object]:
    from libra.trainer.checkpoint import stage_checkpoint
    from libra.trainer.publish import export_weights
    from libra.wire.rank import ExportWeights, SaveCheckpoint

    shutil.rmtree(directory, ignore_errors=True)
    step = trainer.learner.progress.step
    times = {}
    for version in (1, 2):
        exported = export_weights(
            trainer, ExportWeights("r", version, str(directory / f"v{version}"), (1, 2, 3))
        )
        times["export_s"] = round(exported.export_s, 3) if exported else None
    began_at = time.perf_counter()
    staged = stage_checkpoint(trainer, SaveCheckpoint(step, str(directory / "step_1"), b""))
    times["stage_s"] = round(time.perf_counter() - began_at, 2)
    saved = staged.write()
    times["save_s"] = round(saved.save_s, 2) if saved else None
    return times


def bare(config, world, steps) -> dict[str, object]:
    """The same tokens as whole rows of 4096 through plain next-token training."""
    import torch
    from megatron.core import tensor_parallel

    from libra.trainer.assembly import assemble
    from libra.trainer.columns import Packing
    from libra.trainer.optimizer import step_if_finite

    trainer = assemble(config, world, beat=lambda *_: None)
    lengths, row = lengths_of(steps[-1]), 4096
    num_rows = max(1, round(sum(lengths) / row))
    ids = torch.randint(
        0, trainer.backend.architecture.vocab_size, (num_rows, row), device=world.device
    )
    packing = Packing(positions=torch.arange(row, device=world.device), longest=row)
    # As many tokens in a pass as a micro-batch of the step has.
    tokens_per_pass = config.training.micro_batch_size * statistics.mean(lengths)

    def step(_number: int) -> None:
        trainer.backend.model.zero_grad_buffer()
        trainer.backend.optimizer.zero_grad()
        for part in ids.split(max(1, round(tokens_per_pass / row))):
            logits = trainer.backend.model(part, packing.positions, None, packed_seq_params=packing)
            loss = tensor_parallel.vocab_parallel_cross_entropy(logits.float().contiguous(), part)
            (loss.sum() / ids.numel()).backward()
        trainer.backend.model.finish_grad_sync()
        step_if_finite(trainer.backend.optimizer, learning_rate=1e-6)

    return rates(trainer, [row] * num_rows, median_s(step), world)


def profiled(call, world) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        call()
    if world.at.rank == 0:
        table = found.key_averages().table(sort_by="self_cuda_time_total", row_limit=32)
        print("\n".join(line[:60] + line[-170:] for line in table.splitlines()), flush=True)


def report(world, result: dict[str, object]) -> None:
    if world.at.rank == 0:
        print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    main()
