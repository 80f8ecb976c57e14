"""Megatron's logits, logprobs, entropies and gradients against transformers', under torchrun."""

import numpy as np

from trainer_ranks import no_beat, run_config


def check_kinds(world, directory, kinds, **options) -> None:
    """`directory` holds KIND/ (a model) and KIND.safetensors (of make_references.py)."""
    for kind in kinds:
        check(kind, directory, options, world)


def check(kind, directory, options, world) -> None:
    from make_references import tokens_and_weights
    from safetensors.torch import load_file

    from libra.trainer.assembly import assemble
    from libra.trainer.batch import SampleArrays, micro_batches

    expected = load_file(directory / f"{kind}.safetensors")
    trainer = assemble(run_config(directory / kind, **options), world, beat=no_beat)
    tokens, weights = tokens_and_weights(trainer.architecture.vocab_size)
    samples = [
        SampleArrays(
            token_ids=row.int().numpy(),
            sampled=np.arange(1, len(row)),
            # The engine's logprobs carry the weights of the sum that is differentiated.
            rollout_logprobs=weight.numpy(),
            advantage=0.0,
            weight=1.0,
        )
        for row, weight in zip(tokens, weights, strict=True)
    ]
    multiple = trainer.policy.length_multiple
    batches = micro_batches(samples, rows=2, device=world.device, length_multiple=multiple)
    check_weights(trainer, directory / kind)
    check_logits(trainer, tokens, expected)
    check_logprobs(trainer, batches, expected)
    check_gradients(trainer, batches, expected)


def check_weights(trainer, model_directory) -> None:
    import torch
    from safetensors.torch import load_file

    from libra.trainer.hf_weights import gather_hf_tensors

    gathered = dict(gather_hf_tensors(trainer.model, trainer.architecture, trainer.world))
    original = load_file(model_directory / "model.safetensors")
    if trainer.world.at.rank == 0:
        assert gathered.keys() == original.keys()
        assert all(torch.equal(gathered[name], original[name]) for name in original)
    else:
        assert gathered == {}


def check_logits(trainer, tokens, expected) -> None:
    import torch
    from megatron.core import tensor_parallel

    from libra.trainer.model import bare

    if trainer.world.sizes.pipeline > 1:
        return
    # One extra column, so that sequence parallelism can cut the length evenly.
    padded = torch.nn.functional.pad(tokens, (0, 1))
    positions = torch.arange(padded.shape[1]).expand_as(padded)
    with torch.no_grad():
        logits = bare(trainer.model)(padded, positions, None)
    logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
    logits = logits[:, :-1, : trainer.architecture.vocab_size]
    close(logits, expected["logits"], "logits", 1e-4)


def check_logprobs(trainer, batches, expected) -> None:
    import torch
    from make_references import TEMPERATURE

    scores = trainer.policy.logprobs(batches, temperature=TEMPERATURE, beat=lambda: None)
    if not trainer.world.is_last_stage:
        assert scores == []
        return
    rows = [row for batch in batches for row in batch.samples]
    close(torch.cat(scores), expected["logprobs"][rows].flatten(), "logprobs", 1e-5)


def check_gradients(trainer, batches, expected) -> None:
    import torch
    from make_references import TEMPERATURE

    from libra.trainer.hf_weights import gather_hf_tensors, local_parameters
    from libra.trainer.loss import LossSums

    world = trainer.world

    def weighted_sum(scores, batch):
        entropies = expected["entropies"][list(batch.samples)].flatten()
        close(scores[1], entropies, "entropies", 1e-5)
        loss = ((scores[0] + 0.3 * scores[1]) * batch.rollout_logprobs).sum()
        return loss, LossSums(*[loss.detach()] * len(LossSums._fields))

    trainer.model.zero_grad_buffer()
    trainer.policy.forward_backward(
        batches, weighted_sum, temperature=TEMPERATURE, beat=lambda: None
    )
    with torch.no_grad():
        for _, parameter in local_parameters(trainer.model, trainer.architecture, world):
            parameter.copy_(parameter.main_grad / world.sizes.data)
    gradients = dict(gather_hf_tensors(trainer.model, trainer.architecture, world))
    assert bool(gradients) == (world.at.rank == 0)
    for name, gradient in gradients.items():
        wanted = expected[f"gradient.{name}"]
        close(gradient, wanted, f"gradient of {name}", 1e-5 * float(wanted.abs().max()))


def close(got, wanted, what, tolerance) -> None:
    difference = float((got - wanted).abs().max())
    assert difference <= tolerance, f"{what}: {difference} > {tolerance}"
