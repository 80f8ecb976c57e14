"""A backend's logits, logprobs, entropies and gradients against transformers', under torchrun."""

import numpy as np
import pytest

from trainer_ranks import no_beat, run_config


def check_kinds(world, directory, kinds, *, layout=None, **options) -> None:
    """`directory` holds KIND/ (a model) and KIND.safetensors (of make_references.py)."""
    for kind in kinds:
        check(kind, directory, options, world, layout)


def check_other_architectures(world, directory, **options) -> None:
    """What Megatron's mapping does not know; and what would be trained wrongly is refused."""
    from libra.errors import ConfigError
    from libra.trainer.assembly import assemble

    check_kinds(world, directory, ["olmo2"], **options)
    with pytest.raises(ConfigError, match=r"logits of GraniteForCausalLM .* times its output"):
        assemble(run_config(directory / "granite", **options), world, beat=no_beat)


def check(kind, directory, options, world, layout) -> None:
    from make_references import tokens_and_weights
    from safetensors.torch import load_file

    from libra.trainer.assembly import assemble
    from libra.trainer.batch import SampleArrays, micro_batches

    expected = load_file(directory / f"{kind}.safetensors")
    trainer = assemble(run_config(directory / kind, **options), world, beat=no_beat, layout=layout)
    tokens, weights = tokens_and_weights(trainer.backend.vocab_size)
    samples = [
        SampleArrays(
            token_ids=row.int().numpy(),
            sampled=np.arange(1, len(row)),
            # The engine's logprobs carry the weights of the sum that is differentiated, and tell
            # which tokens are scored on this rank.
            rollout_logprobs=weight.numpy(),
            advantage=0.0,
            weight=1.0,
        )
        for row, weight in zip(tokens, weights, strict=True)
    ]
    batches = micro_batches(samples, rows=2, arrangement=trainer.backend.arrangement)
    check_weights(trainer, directory / kind)
    check_logits(trainer, tokens, expected)
    check_logprobs(trainer, batches, expected)
    check_gradients(trainer, batches, expected)


def check_weights(trainer, model_directory) -> None:
    import torch
    from safetensors.torch import load_file

    gathered = dict(trainer.backend.hf_tensors(beat=lambda: None))
    original = load_file(model_directory / "model.safetensors")
    if trainer.world.at.rank == 0:
        assert gathered.keys() == original.keys()
        assert all(torch.equal(gathered[name], original[name]) for name in original)
    else:
        assert gathered == {}


def check_logits(trainer, tokens, expected) -> None:
    import torch

    sizes, name = trainer.world.sizes, trainer.backend.name
    if sizes.pipeline > 1 or sizes.context > 1 or name != "megatron_core":
        return
    from megatron.core import tensor_parallel

    from libra.trainer.columns import Packing
    from libra.trainer.model import bare

    # One extra column, so that sequence parallelism can cut the length evenly.
    padded = torch.nn.functional.pad(tokens, (0, 1))
    packing = Packing(positions=torch.arange(padded.shape[1]), longest=padded.shape[1])
    with torch.no_grad():
        logits = bare(trainer.backend.model)(
            padded, packing.positions, None, packed_seq_params=packing
        )
    logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
    logits = logits[:, :-1, : trainer.backend.vocab_size]
    close(logits, expected["logits"], "logits", 1e-4)


def check_logprobs(trainer, batches, expected) -> None:
    from make_references import TEMPERATURE

    from libra.trainer.head import Sampling

    scores = trainer.backend.logprobs(batches, sampling=Sampling(TEMPERATURE), beat=lambda: None)
    if not trainer.world.is_last_stage:
        assert scores == []
        return
    for score, batch in zip(scores, batches, strict=True):
        close(score, chosen(expected["logprobs"], batch), "logprobs", 1e-5)


def check_gradients(trainer, batches, expected) -> None:
    import torch
    from make_references import TEMPERATURE

    from libra.trainer.head import Sampling
    from libra.trainer.loss import LossSums

    world = trainer.world

    def weighted_sum(scores, batch):
        close(scores[1], chosen(expected["entropies"], batch), "entropies", 1e-5)
        loss = ((scores[0] + 0.3 * scores[1]) * batch.rollout_logprobs).sum()
        return loss, LossSums(*[loss.detach()] * len(LossSums._fields))

    trainer.backend.forward_backward(
        batches, weighted_sum, sampling=Sampling(TEMPERATURE), beat=lambda: None
    )
    with torch.no_grad():
        for parameter in trainer.backend.model.parameters():
            gradient = getattr(parameter, "main_grad", parameter.grad)
            parameter.copy_(gradient / world.sizes.data)
    gradients = dict(trainer.backend.hf_tensors(beat=lambda: None))
    assert bool(gradients) == (world.at.rank == 0)
    for name, gradient in gradients.items():
        wanted = expected[f"gradient.{name}"]
        close(gradient, wanted, f"gradient of {name}", 1e-5 * float(wanted.abs().max()))


def chosen(values, batch):
    """What was computed for the tokens of a micro-batch, found by their random weights."""
    import torch
    from make_references import tokens_and_weights

    weights = tokens_and_weights(1)[1].flatten()
    where = (weights[None] == batch.rollout_logprobs[:, None]).nonzero()[:, 1]
    assert len(where) == len(batch.rollout_logprobs)
    assert torch.equal(weights[where], batch.rollout_logprobs)
    return values.flatten()[where]


def close(got, wanted, what, tolerance) -> None:
    difference = float((got - wanted).abs().max())
    assert difference <= tolerance, f"{what}: {difference} > {tolerance}"
