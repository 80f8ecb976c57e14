"""Training across a save and a restore, under torchrun."""

import msgspec
import pytest

from trainer_ranks import make_samples, no_beat, run_config, train_step

VOCAB_SIZE = 250
SAVED_STEP, LAST_STEP = 2, 5
"""Several steps after the restored one: wrong optimizer state shows only from the second on."""

VARIANTS = {
    "float32": {},
    "distributed": {"megatron_use_distributed_optimizer": True},
    "bfloat16": {"train_dtype": "bfloat16"},
    "distributed_bfloat16": {
        "train_dtype": "bfloat16",
        "megatron_use_distributed_optimizer": True,
    },
    "reference": {"kl_coefficient": 0.1},
    "experts": {"megatron_sequence_parallel": True},
    "distributed_experts": {
        "megatron_sequence_parallel": True,
        "megatron_use_distributed_optimizer": True,
    },
}
BASE = {
    "micro_batch_size": 4,
    "lr_schedule": "cosine",
    "lr_warmup_steps": 2,
    "lr_decay_steps": 8,
    "weight_decay": 0.01,
    "adam_eps": 1e-2,
}
CHANGED = {
    "learning_rate": 5e-3,
    "weight_decay": 0.2,
    "adam_beta1": 0.5,
    "adam_beta2": 0.7,
    "adam_eps": 1e-4,
}


def go_on_all(world, models, directory, action, **layout) -> dict[str, list[dict[str, float]]]:
    """Train, save in `directory` and go on; or restore from there and go on. Returns metrics."""
    results = {}
    for name, options in variants_of(layout["train_backend"]):
        model = models / ("qwen3_moe" if "experts" in name else "qwen2")
        config = run_config(model, **BASE | layout | options)
        results[name] = go_on(config, world, directory / name, action)
    return results


def variants_of(backend) -> list[tuple[str, dict[str, object]]]:
    """The variants that differ under a backend: without Megatron's options several are one."""
    if backend == "megatron_core":
        return list(VARIANTS.items())
    return [
        (name, {} if name == "experts" else options)
        for name, options in VARIANTS.items()
        if not name.startswith("distributed")
    ]


def check_spread_experts(world, models, directory, **layout) -> None:
    """Save and restore with experts on several ranks; refuse what was saved with all on one."""
    from libra.errors import DataError

    for name in ("experts", "distributed_experts"):
        config = run_config(models / "qwen3_moe", **BASE | layout | VARIANTS[name])
        own = directory / "spread" / name
        assert go_on(config, world, own, "save") == go_on(config, world, own, "restore")
        check_changed(world, config, own)
        with pytest.raises(DataError, match="train_ep_size 1"):
            go_on(config, world, directory / name, "restore")


def check_changed_all(world, models, directory, **layout) -> None:
    """Restore with another configuration than was saved with, under every variant."""
    for name, options in variants_of(layout["train_backend"]):
        model = models / ("qwen3_moe" if "experts" in name else "qwen2")
        config = run_config(model, **BASE | layout | options)
        check_changed(world, config, directory / name)


def check_changed(world, config, directory) -> None:
    """Hyper-parameters are the new configuration's, everything else is the checkpoint's."""
    from libra.trainer.assembly import assemble
    from libra.trainer.checkpoint import restore_checkpoint

    training = msgspec.structs.replace(config.training, **CHANGED)
    other = msgspec.structs.replace(config, training=training)
    same, changed = (assemble(it, world, beat=no_beat) for it in (config, other))
    wanted = hyper_parameters(changed)
    assert {it["lr"] for it in wanted} == {5e-3}
    assert {it["betas"] for it in wanted} == {(0.5, 0.7)}
    assert {it["eps"] for it in wanted} == {1e-4}
    # None on biases and norms.
    assert {it["weight_decay"] for it in wanted} == {0.0, 0.2}
    for trainer in (same, changed):
        restore_checkpoint(trainer, directory / f"step_{SAVED_STEP:06d}")
    assert hyper_parameters(changed) == wanted
    state, of_same = optimizer_state(changed), optimizer_state(same)
    assert any(moment.any() for moment in state)
    assert all(torch_equal(*pair) for pair in zip(state, of_same, strict=True))
    before, after = train(same, SAVED_STEP + 1), train(changed, SAVED_STEP + 1)
    assert after["num_optimizer_steps"] == 2
    # One cosine from another peak.
    ratio = after["learning_rate"] / before["learning_rate"]
    assert ratio == pytest.approx(5e-3 / config.training.learning_rate)
    for trained, asked in zip(hyper_parameters(changed), wanted, strict=True):
        assert trained | {"lr": 5e-3} == asked


def inner_optimizers(trainer) -> list:
    """The torch optimizers under a backend's."""
    if trainer.backend.name == "fsdp":
        return [trainer.backend.optimizer]
    from libra.trainer.optimizer import torch_optimizers

    return torch_optimizers(trainer.backend.optimizer)


def hyper_parameters(trainer) -> list[dict[str, object]]:
    """Of every group of parameters."""
    names = ("lr", "weight_decay", "betas", "eps")
    groups = [group for it in inner_optimizers(trainer) for group in it.param_groups]
    return [{name: group[name] for name in names} for group in groups]


def optimizer_state(trainer) -> list:
    """Main weights, moments and steps, in the order of the parameters."""
    found = []
    for inner in inner_optimizers(trainer):
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            state = inner.state[parameter]
            found += [parameter.detach(), *(state[k] for k in ("exp_avg", "exp_avg_sq", "step"))]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in found]


def torch_equal(one, other) -> bool:
    import torch

    return torch.equal(one, other)


def go_on(config, world, directory, action) -> list[dict[str, float]]:
    from libra.trainer.assembly import assemble
    from libra.trainer.checkpoint import restore_checkpoint, stage_checkpoint
    from libra.trainer.probe import probe_logprobs
    from libra.wire.rank import SaveCheckpoint

    trainer = assemble(config, world, beat=no_beat)
    checkpoint = directory / f"step_{SAVED_STEP:06d}"
    if action == "save":
        for step in range(1, SAVED_STEP + 1):
            train(trainer, step)
        command = SaveCheckpoint(
            step=SAVED_STEP, directory=str(checkpoint), rollout_state=b"cursor"
        )
        trainer.backend.prepare_to_stage()
        num_bytes = num_host_bytes(trainer)
        staged = stage_checkpoint(trainer, command)
        if config.megatron.megatron_use_distributed_optimizer:
            check_gathered_state(trainer.backend.optimizer)
    else:
        # Weights gathered for a pass before the restore must not be used after it.
        probe_logprobs(trainer, (1, 2, 3))
        restore_checkpoint(trainer, checkpoint)
    assert trainer.learner.progress.step == SAVED_STEP
    if config.algorithm.kl_coefficient:
        check_reference(trainer, config)
    metrics = [train(trainer, step) for step in range(SAVED_STEP + 1, LAST_STEP + 1)]
    if action == "save":
        # Written when training is three steps further: those must not be in it.
        assert not checkpoint.exists()
        staged.write()
        assert num_host_bytes(trainer) == num_bytes
    return metrics


def check_reference(trainer, config) -> None:
    """The KL reference is the base model, and no longer the policy."""
    from libra.trainer.assembly import assemble

    of_base = logprobs(trainer, assemble(config, trainer.world, beat=no_beat).backend)
    of_reference = logprobs(trainer, trainer.backend.reference)
    assert of_reference == of_base
    differences = [a - b for a, b in zip(logprobs(trainer, trainer.backend), of_base, strict=True)]
    assert not of_base or max(map(abs, differences)) > 1e-3


def logprobs(trainer, scorer) -> list[float]:
    """Of some sampled tokens, on the last stage."""
    from libra.trainer.batch import decode_mini_batch, micro_batches
    from libra.trainer.head import Sampling

    command = train_step(1, [make_samples(9, 4, VOCAB_SIZE)], dp_rank=0, dp_size=1)
    samples = decode_mini_batch(
        command.mini_batches[0],
        aggregation="token-mean",
        horizon_tokens=32,
        vocab_size=VOCAB_SIZE,
    )
    batches = micro_batches(samples, rows=4, arrangement=trainer.backend.arrangement)
    scores = scorer.logprobs(batches, sampling=Sampling(1.0), beat=lambda: None)
    return [value for score in scores for value in score.tolist()]


def num_host_bytes(trainer) -> int:
    """That the next checkpoint finds ready."""
    memory = trainer.backend._host_memory
    arena = memory.take()
    arena.give_back()
    return arena.num_bytes


def check_gathered_state(optimizer) -> None:
    """Our way to the optimizer's state gives what Megatron's own does, in pieces of odd size."""
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from libra.trainer.optimizer_gather import gather_state

    of_megatron = DistributedOptimizer.get_parameter_state_dp_zero.replaced
    inner = [o for o in optimizer.chained_optimizers if isinstance(o, DistributedOptimizer)]
    assert inner
    for one in inner:
        wanted = of_megatron(one, use_gloo_comm=False, return_on_all_ranks=True)
        got = gather_state(one, piece_elements=777)
        assert (got is None) == (one.data_parallel_group.rank() != 0)
        for index in got or ():
            if index == "buckets_coalesced":
                continue
            ((dtype, tensors),) = wanted[index].items()
            found = got[index][dtype]
            assert tensors.keys() == found.keys()
            assert tensors.pop("numel_unpadded") == found["numel_unpadded"]
            for begin, end, _ in one.buffers[index].param_index_map.values():
                for key, tensor in tensors.items():
                    assert torch.equal(found[key][begin:end], tensor[begin:end])


def train(trainer, step) -> dict[str, float]:
    world = trainer.world
    samples = make_samples(step, 8, VOCAB_SIZE)
    command = train_step(
        step, [samples[:4], samples[4:]], dp_rank=world.at.data, dp_size=world.sizes.data
    )
    metrics = msgspec.to_builtins(trainer.learner.train(command))
    return {k: v for k, v in metrics.items() if not k.endswith(("_s", "_bytes"))}
