"""Micro-batches through the model under Megatron's schedule: forward only, or with backward."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from libra.trainer.architecture import Architecture
from libra.trainer.backend import Beat, Loss
from libra.trainer.batch import MicroBatch
from libra.trainer.head import Head, Sampling, ScoreRequest, score_request, token_scores
from libra.trainer.loss import LossSums
from libra.trainer.tensor_map import padded_vocab_size
from libra.trainer.world import World


class Pipeline:
    """Runs one model. Every rank of the world must make the same calls in the same order."""

    def __init__(
        self, model: Any, architecture: Architecture, world: World, *, logit_rows: int
    ) -> None:
        """`logit_rows`: sequences whose logits may exist at once."""
        self._model = model
        self._logit_rows = logit_rows
        vocab_slice = padded_vocab_size(architecture, world.sizes.tensor) // world.sizes.tensor
        start = vocab_slice * world.at.tensor
        self._vocab_slice = vocab_slice
        self._head = Head(
            vocab_start=start,
            num_valid=min(max(architecture.vocab_size - start, 0), vocab_slice),
            group=world.tensor_group if world.sizes.tensor > 1 else None,
        )

    def logprobs(
        self, batches: Sequence[MicroBatch], *, sampling: Sampling, beat: Beat
    ) -> list[torch.Tensor]:
        """Score without gradients: float32[n] per micro-batch on the last stage, else nothing."""

        def keep(scores: torch.Tensor, **_how: bool) -> torch.Tensor:
            return scores[0]

        with torch.no_grad():
            results: list[torch.Tensor] = self._run(
                batches,
                lambda _batch: keep,
                sampling=sampling,
                beat=beat,
                forward_only=True,
                collect_non_loss_data=True,
            )
        return results

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss: Loss, *, sampling: Sampling, beat: Beat
    ) -> list[LossSums]:
        """Add the gradients of the summed losses, reduced over the world, to the model's buffers.

        Returns the sums of each micro-batch on the last stage, else nothing.
        """

        def lose(batch: MicroBatch, scores: torch.Tensor) -> tuple[torch.Tensor, Any, LossSums]:
            value, sums = loss(scores, batch)
            # The second number is Megatron's token count, which we have no use for.
            return value, torch.zeros((), dtype=torch.int), sums

        results: list[LossSums] = self._run(
            batches,
            lambda batch: partial(lose, batch),
            sampling=sampling,
            beat=beat,
            forward_only=False,
            collect_non_loss_data=False,
        )
        return results

    def _run(
        self,
        batches: Sequence[MicroBatch],
        finisher: Callable[[MicroBatch], Callable[..., Any]],
        *,
        sampling: Sampling,
        beat: Beat,
        **schedule_options: Any,
    ) -> list[Any]:
        def forward(iterator: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
            batch = next(iterator)
            beat()
            output = model(
                batch.token_ids,
                batch.packing.positions,
                None,
                packed_seq_params=batch.packing,
                output_processor=score_tokens,
                output_processor_context=self._request(batch, sampling),
            )
            return output, finisher(batch)

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[self._model],
            num_microbatches=len(batches),
            seq_length=max(batch.token_ids.shape[1] for batch in batches),
            micro_batch_size=max(batch.token_ids.shape[0] for batch in batches),
            **schedule_options,
        )
        return results

    def _request(self, batch: MicroBatch, sampling: Sampling) -> ScoreRequest:
        return score_request(
            self._head,
            batch,
            sampling,
            logit_rows=self._logit_rows,
            vocab_slice=self._vocab_slice,
        )


def score_tokens(
    hidden_states: torch.Tensor,
    output_layer: Any,
    output_weight: torch.Tensor | None,
    context: ScoreRequest,
    config: Any,
    **_unused: Any,
) -> torch.Tensor:
    """GPTModel's `output_processor`: [s, b, hidden] -> float32[2, n], logprobs and entropies."""
    if config.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states)
    else:
        hidden_states = copy_to_tensor_model_parallel_region(hidden_states)
    weight = output_layer.weight if output_weight is None else output_weight
    chosen = hidden_states.flatten(0, 1).index_select(0, context.positions)
    return token_scores(chosen, weight, context)
