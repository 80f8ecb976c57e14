"""A few training steps per scenario, under torchrun."""

import msgspec

from trainer_ranks import make_sample, make_samples, no_beat, run_config, train_step

VOCAB_SIZE = 250
NUM_STEPS = 3
EVERYTHING = 64

BASE = {
    "micro_batch_size": EVERYTHING,
    "recompute_micro_batch_size": EVERYTHING,
    "batch_size": 12,
    "mini_batch_size": 6,
    # Adam divides by the gradient's size; a large eps keeps rounding from being blown up by it.
    "adam_eps": 1e-2,
    "temperature": 0.8,
    "max_new_tokens": 16,
}
OBJECTIVES = {
    "plain": {},
    "dapo": {"clip_ratio_high": 0.28, "clip_ratio_dual": 3.0, "entropy_coefficient": 0.02},
    "grpo_kl": {"loss_agg_mode": "seq-mean-token-mean", "kl_coefficient": 0.1},
    "gspo": {
        "policy_loss": "gspo",
        "loss_agg_mode": "seq-mean-token-mean",
        "importance_correction": "sequence_tis",
    },
    "cispo": {"policy_loss": "cispo", "importance_correction": "icepop"},
    "dr_grpo": {
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "importance_correction": "sequence_mask",
        "kl_coefficient": 0.05,
        "kl_estimator": "k2",
        "kl_unbiased": True,
    },
    "two_policies": {"recompute_logprobs": False, "importance_correction": "none"},
}
SPLITS = {
    "whole": {},
    "ones": {"micro_batch_size": 1, "recompute_micro_batch_size": 1},
    "fours": {"micro_batch_size": 4, "recompute_micro_batch_size": 3},
    "recomputed_activations": {"micro_batch_size": 4},
}
RECOMPUTE = {
    "megatron_core": {"megatron_recompute_granularity": "full"},
    "fsdp": {"fsdp_gradient_checkpointing": True},
}


def learn_all(
    world, model, *, objectives=tuple(OBJECTIVES), layout=None, **sizes
) -> dict[str, list[dict[str, float]]]:
    """Metrics of the steps of every scenario; the same on every rank."""
    results = {}
    for name in objectives:
        objective = OBJECTIVES[name]
        splits = SPLITS if name in {"plain", "gspo"} else {"whole": {}}
        for split, options in splits.items():
            if split == "recomputed_activations":
                options = options | RECOMPUTE[sizes["train_backend"]]  # noqa: PLW2901
            config = run_config(model, **BASE | sizes | objective | options)
            results[f"{name}/{split}"] = learn(config, world, layout=layout)
    single = run_config(model, **BASE | sizes | {"mini_batch_size": 0})
    results["one_mini_batch"] = learn(single, world, mini_batches=1, layout=layout)
    # Fewer samples than data-parallel ranks: some shards are empty.
    results["one_sample"] = learn(run_config(model, **BASE | sizes), world, count=1, layout=layout)
    return results


def learn(config, world, *, count=12, mini_batches=2, layout=None) -> list[dict[str, float]]:
    from libra.trainer.assembly import assemble

    trainer = assemble(config, world, beat=no_beat, layout=layout)
    steps = []
    for step in range(1, NUM_STEPS + 1):
        samples = make_samples(step, count, VOCAB_SIZE)
        # A trajectory without a sampled token is in no count.
        samples.append(unsampled(step))
        command = train_step(
            step,
            [samples[index::mini_batches] for index in range(mini_batches)],
            dp_rank=world.at.data,
            dp_size=world.sizes.data,
        )
        steps.append(msgspec.to_builtins(trainer.learner.train(command)))
    return steps


def unsampled(seed: int):
    import numpy as np

    sample = make_sample(np.random.default_rng(seed), VOCAB_SIZE, name="prompt only", length=9)
    return msgspec.structs.replace(sample, loss_mask=bytes(9))
