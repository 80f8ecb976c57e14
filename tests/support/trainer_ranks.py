"""What the scripts that torchrun starts have in common: one rank's trainer from a few options."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from libra.config.load import current_environ
from libra.config.run import RunConfig
from libra.wire.rank import MiniBatch, Sample, TrainStep

FLAT_SECTIONS = (
    "control",
    "training",
    "megatron",
    "algorithm",
    "rollout",
    "supervision",
    "global_resource_planner",
)


def run_config(model_path: Path, **options: Any) -> RunConfig:
    """A RunConfig on the CPU in float32 from flat option names."""
    given = {"device": "cpu", "train_dtype": "float32", "learning_rate": 1e-3} | options
    sections: dict[str, Any] = {"model": {"model_path": str(model_path)}}
    for field in msgspec.structs.fields(RunConfig):
        if field.name in FLAT_SECTIONS:
            known = {f.name for f in msgspec.structs.fields(field.type)}
            sections[field.name] = {k: given.pop(k) for k in known & given.keys()}
    assert not given, f"no such options: {sorted(given)}"
    return msgspec.convert(sections, RunConfig)


@contextmanager
def joined_world(config: RunConfig) -> Iterator[Any]:
    """The World of this torchrun rank."""
    has_megatron = config.training.train_backend == "megatron_core"
    if has_megatron:
        from libra.trainer import cpu_path

        cpu_path.enable()
    import torch

    from libra.trainer.layout import coordinates, parallel_sizes
    from libra.trainer.world import choose_device, join_world, leave_world

    torch.set_num_threads(1)
    environment = current_environ()
    rank, local_rank = int(environment["RANK"]), int(environment["LOCAL_RANK"])
    sizes = parallel_sizes(config.training, world_size=int(environment["WORLD_SIZE"]))
    at = coordinates(sizes, rank=rank, local_rank=local_rank)
    device = choose_device(config.control.device, local_rank=local_rank)
    world = join_world(sizes, at, device, timeout_s=60, has_megatron=has_megatron)
    try:
        yield world
    finally:
        leave_world()


def no_beat(step: int, phase: str) -> None:
    pass


def make_sample(rng: np.random.Generator, vocab_size: int, *, name: str, length: int) -> Sample:
    """A trajectory of random tokens, about half of them sampled, with plausible logprobs."""
    mask = (rng.random(length) < 0.6).astype(np.uint8)
    mask[0] = 0
    logprobs = np.where(mask == 1, -rng.random(length) - 4.5, np.nan).astype(np.float32)
    return Sample(
        trajectory_id=name,
        token_ids=rng.integers(0, vocab_size, length, dtype=np.int32).tobytes(),
        loss_mask=mask.tobytes(),
        rollout_logprobs=logprobs.tobytes(),
        advantage=float(rng.normal()),
    )


def make_samples(seed: int, count: int, vocab_size: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 30, count)
    return [
        make_sample(rng, vocab_size, name=f"t{i}", length=int(n)) for i, n in enumerate(lengths)
    ]


def train_step(
    step: int, mini_batches: list[list[Sample]], *, dp_rank: int, dp_size: int
) -> TrainStep:
    """The command for one data-parallel rank: every dp_size-th sample of each mini-batch."""
    return TrainStep(
        step=step,
        mini_batches=tuple(
            MiniBatch(
                samples=tuple(samples[dp_rank::dp_size]),
                global_num_tokens=sum(sum(sample.loss_mask) for sample in samples),
                global_num_sequences=sum(any(sample.loss_mask) for sample in samples),
            )
            for samples in mini_batches
        ),
    )
