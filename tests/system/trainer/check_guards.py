"""What must stop or skip a step does, on two data-parallel ranks alike. Under torchrun."""

from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from trainer_ranks import make_samples, no_beat, run_config, train_step

VOCAB_SIZE = 250


def check_guards(world, model, **layout) -> None:
    config = run_config(model, max_skipped_steps=2, recompute_logprobs=False, **layout)
    check_skips(config, world)
    check_refusals(config, world)
    if config.training.train_backend == "megatron_core":
        check_head()


def check_skips(config, world) -> None:
    from libra.errors import LearningStoppedError
    from libra.trainer.assembly import assemble

    trainer = assemble(config, world, beat=no_beat)
    learner = trainer.learner

    def train(step, *mini_batches):
        return learner.train(
            train_step(step, list(mini_batches), dp_rank=world.at.data, dp_size=world.sizes.data)
        )

    good, bad = make_samples(1, 4, VOCAB_SIZE), make_samples(2, 4, VOCAB_SIZE)
    bad[0] = poisoned(bad[0])
    empty = [msgspec.structs.replace(s, loss_mask=bytes(len(s.loss_mask))) for s in good]

    before = fingerprint(trainer)
    metrics = train(1, bad)
    assert (metrics.num_optimizer_steps, metrics.num_skipped_steps) == (0, 1)
    assert fingerprint(trainer) == before, "a step with a NaN changed the weights"

    metrics = train(2, empty)
    assert (metrics.num_optimizer_steps, metrics.num_skipped_steps) == (0, 1)
    assert metrics.loss == metrics.grad_norm == 0.0
    assert fingerprint(trainer) == before, "a step without a token changed the weights"

    # One NaN, then one good mini-batch: the good one counts and ends the row of bad ones.
    metrics = train(3, good, empty)
    assert (metrics.num_optimizer_steps, metrics.num_skipped_steps) == (1, 1)
    assert learner.progress.num_skipped_in_a_row == 0
    assert fingerprint(trainer) != before
    optimizer = trainer.backend.optimizer
    if trainer.backend.name == "megatron_core":
        optimizer = optimizer.chained_optimizers[0].optimizer
    assert {float(s["step"]) for s in optimizer.state.values()} == {1.0}

    check_infinite_norm(trainer, partial(train, 4), good)
    with pytest.raises(LearningStoppedError, match="2 optimizer steps in a row"):
        train(5, bad)


def check_infinite_norm(trainer, train, samples) -> None:
    """A loss that can be written down, and gradients whose squares cannot."""
    before = fingerprint(trainer)
    metrics = train([msgspec.structs.replace(it, advantage=1e30) for it in samples])
    assert np.isfinite(metrics.loss)
    assert not np.isfinite(metrics.grad_norm)
    assert (metrics.num_optimizer_steps, metrics.num_skipped_steps) == (0, 1)
    assert fingerprint(trainer) == before, "a step with an infinite norm changed the weights"


def check_refusals(config, world) -> None:
    from libra.errors import DataError, InvariantError
    from libra.trainer.assembly import assemble
    from libra.trainer.batch import decode_mini_batch

    trainer = assemble(config, world, beat=no_beat)
    command = train_step(2, [make_samples(1, 2, VOCAB_SIZE)], dp_rank=0, dp_size=1)
    with pytest.raises(InvariantError, match="step 2 when 1 is next"):
        trainer.learner.train(command)

    mini_batch = command.mini_batches[0]
    for changes, message in (
        ({"token_ids": np.array([1, 250], "<i4").tobytes()}, "a token id outside"),
        ({"loss_mask": b"\x01" * 2}, "first token is marked as sampled"),
        ({"rollout_logprobs": b""}, "2 tokens, 2 mask entries and 0 logprobs"),
    ):
        whole = {
            "token_ids": np.array([1, 2], "<i4").tobytes(),
            "loss_mask": b"\x00\x01",
            "rollout_logprobs": np.zeros(2, "<f4").tobytes(),
        }
        sample = msgspec.structs.replace(mini_batch.samples[0], **whole | changes)
        broken = msgspec.structs.replace(mini_batch, samples=(sample,))
        with pytest.raises(DataError, match=f"trajectory t0: .*{message}"):
            decode_mini_batch(
                broken, aggregation="token-mean", horizon_tokens=1, vocab_size=VOCAB_SIZE
            )
    if trainer.backend.name == "megatron_core":
        check_options(Path(config.model.model_path), world)


def check_options(model_path, world) -> None:
    from libra.errors import ConfigError
    from libra.trainer.assembly import assemble

    for options, message in (
        ({"megatron_optimizer_cpu_offload": True}, "needs CUDA"),
        ({"megatron_use_precision_aware_optimizer": True}, "needs CUDA and Transformer Engine"),
        ({"lr_schedule": "cosine"}, "lr_decay_steps"),
    ):
        with pytest.raises(ConfigError, match=message):
            assemble(run_config(model_path, **options), world, beat=no_beat)


def check_head() -> None:
    """One rank's scores of hand-made logits: hidden states are one-hot, so weights are logits."""
    import torch

    from libra.trainer.head import Head, Sampling, ScoreRequest
    from libra.trainer.pipeline import score_tokens

    class Layer:
        weight = torch.tensor([[2.0, 0.5], [0.0, 0.1], [-1.0, -3.0], [50.0, 50.0]])

    class Config:
        sequence_parallel = False

    def scores(temperature, chunk_tokens, hidden, weight, top_p=1.0):
        request = ScoreRequest(
            head=Head(vocab_start=0, num_valid=3, group=None),
            positions=torch.tensor([0, 0, 0, 1, 1]),
            targets=torch.tensor([0, 1, 2, 2, 0]),
            sampling=Sampling(temperature, top_p),
            chunk_tokens=chunk_tokens,
        )
        return score_tokens(hidden[:, None], Layer, weight, request, Config)

    # T-B26: scored under the temperature of sampling; the fourth row is padding and has no say.
    hidden = torch.eye(2)
    cold = scores(0.6, 8, hidden, Layer.weight)[0, :3]
    warm = scores(1.0, 8, hidden, Layer.weight)[0, :3]
    assert cold.tolist() == pytest.approx([-0.0415372, -3.3748705, -5.0415372], abs=1e-6)
    assert warm.tolist() == pytest.approx([-0.169846, -2.169846, -3.169846], abs=1e-6)

    # T-B27: with the mass of top-p made 1. The first token has .844 of it, the first two .941.
    kept_one = scores(1.0, 8, hidden, Layer.weight, top_p=0.8)[0, :3]
    assert kept_one[0] == 0.0
    kept_two = scores(1.0, 8, hidden, Layer.weight, top_p=0.9)[:, 0]
    assert kept_two.tolist() == pytest.approx([-0.126928, 0.365334], abs=1e-5)

    # Logits in chunks, forward and backward, against autograd over the whole.
    hidden = torch.randn(2, 2, requires_grad=True)
    weight = torch.randn(4, 2, requires_grad=True)
    log_p = torch.log_softmax(hidden[[0, 0, 0, 1, 1]] @ weight[:3].t() / 0.6, -1)
    wanted = torch.stack([log_p[range(5), [0, 1, 2, 2, 0]], -(log_p.exp() * log_p).sum(-1)])
    factors = torch.randn(2, 5)
    expected = torch.autograd.grad((wanted * factors).sum(), [hidden, weight])
    for chunk_tokens in (1, 2, 5, 9):
        got = scores(0.6, chunk_tokens, hidden, weight)
        torch.testing.assert_close(got, wanted)
        gradients = torch.autograd.grad((got * factors).sum(), [hidden, weight])
        torch.testing.assert_close(gradients, expected)


def poisoned(sample):
    """NaN in the engine's logprob of a sampled token."""
    logprobs = np.frombuffer(sample.rollout_logprobs, "<f4").copy()
    mask = np.frombuffer(sample.loss_mask, np.uint8).copy()
    mask[-1], logprobs[-1] = 1, np.nan
    return msgspec.structs.replace(
        sample, loss_mask=mask.tobytes(), rollout_logprobs=logprobs.tobytes()
    )


def fingerprint(trainer) -> list[float]:
    return [float(p.detach().double().sum()) for p in trainer.backend.model.parameters()]
