"""From the wire's samples to micro-batches of tensors."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from libra.algorithms.objective import Aggregation, token_weight
from libra.errors import DataError
from libra.trainer.columns import Columns, Packing, packed_columns, padded_columns
from libra.wire.rank import MiniBatch, Sample


class SampleArrays(NamedTuple):
    """One trajectory of L tokens, n of them sampled by the policy."""

    token_ids: NDArray[np.int32]
    """[L]"""

    sampled: NDArray[np.int64]
    """[n] positions of the sampled tokens, rising, none of them 0."""

    rollout_logprobs: NDArray[np.float32]
    """[n]"""

    advantage: float
    weight: float
    """What each token's loss is multiplied by; the mini-batch's global counts are in it."""


Layout: TypeAlias = Literal["padded", "packed"]


class Arrangement(NamedTuple):
    """How a rank lays the sequences of a micro-batch out for one forward pass."""

    layout: Layout
    """Rows of the longest sequence's length, or all sequences behind each other in one row."""

    device: torch.device
    length_multiple: int = 1
    """What the number of columns must be a multiple of."""

    context_size: int = 1
    context_index: int = 0
    context_group: Any = None
    """Context parallelism, which takes the packed layout: this rank's share of each sequence."""


class MicroBatch(NamedTuple):
    """What one forward pass on one rank takes: m sequences, n tokens to score on this rank.

    The n tokens stand in order of sequences, then positions; sequence i has `lengths[i]` of them
    here and `num_sampled[i]` over all context-parallel ranks.
    """

    samples: tuple[int, ...]
    """Which samples of the mini-batch the sequences are."""

    token_ids: torch.Tensor
    """int64[b, s]: rows and columns of the layout; padding is 0."""

    packing: Packing

    scored: torch.Tensor
    """int64[n]: the position before each sampled token, as an index into the flattened [s, b]."""

    targets: torch.Tensor
    """int64[n]: the sampled tokens."""

    lengths: torch.Tensor
    """int64[m]"""

    num_sampled: torch.Tensor
    """int64[m]"""

    rollout_logprobs: torch.Tensor
    """float32[n]"""

    advantages: torch.Tensor
    """float32[n]"""

    weights: torch.Tensor
    """float32[n]"""

    old_logprobs: torch.Tensor | None = None
    """float32[n] under the proximal policy; None: those of the very forward being trained."""

    reference_logprobs: torch.Tensor | None = None
    """float32[n]; None without a KL term."""


def decode_mini_batch(
    mini_batch: MiniBatch, *, aggregation: Aggregation, horizon_tokens: int, vocab_size: int
) -> list[SampleArrays]:
    """Check and decode one shard. Raises DataError naming the trajectory that cannot be used."""
    decoded: list[SampleArrays] = []
    for sample in mini_batch.samples:
        token_ids, sampled, rollout_logprobs = _decode(sample, vocab_size)
        weight = token_weight(
            aggregation,
            num_tokens=len(sampled),
            global_num_tokens=mini_batch.global_num_tokens,
            global_num_sequences=mini_batch.global_num_sequences,
            horizon_tokens=horizon_tokens,
        )
        decoded.append(
            SampleArrays(token_ids, sampled, rollout_logprobs[sampled], sample.advantage, weight)
        )
    return decoded


def _decode(
    sample: Sample, vocab_size: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float32]]:
    token_ids = np.frombuffer(sample.token_ids, "<i4")
    loss_mask = np.frombuffer(sample.loss_mask, np.uint8)
    rollout_logprobs = np.frombuffer(sample.rollout_logprobs, "<f4")
    who = f"trajectory {sample.trajectory_id}"
    if not len(token_ids) == len(loss_mask) == len(rollout_logprobs) > 0:
        raise DataError(
            f"{who}: {len(token_ids)} tokens, {len(loss_mask)} mask entries and "
            f"{len(rollout_logprobs)} logprobs, which must be one number above 0"
        )
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise DataError(f"{who}: a token id outside the vocabulary of {vocab_size}")
    if loss_mask[0]:
        raise DataError(f"{who}: its first token is marked as sampled, but nothing predicts it")
    return token_ids, np.flatnonzero(loss_mask).astype(np.int64), rollout_logprobs


def micro_batches(
    samples: Sequence[SampleArrays], *, rows: int, arrangement: Arrangement
) -> list[MicroBatch]:
    """Split a shard into micro-batches of up to `rows` sequences of like length, longest first.

    An empty shard still makes one micro-batch, without a token to train: its rank has to take
    part in the collectives of the others.
    """
    by_length = sorted(range(len(samples)), key=lambda i: -len(samples[i].token_ids))
    chosen = [by_length[at : at + rows] for at in range(0, len(by_length), rows)]
    return [_micro_batch(samples, indices, arrangement) for indices in chosen or [[]]]


def _micro_batch(
    samples: Sequence[SampleArrays], indices: Sequence[int], arrangement: Arrangement
) -> MicroBatch:
    chosen = [samples[index] for index in indices]
    columns = _columns(chosen, arrangement)
    # The sampled tokens of each sequence that this rank scores, as indices into them.
    owned = [columns.scored_here(at, sample.sampled) for at, sample in enumerate(chosen)]
    lengths = np.array([len(which) for which, _ in owned] or [0], np.int64)
    device = arrangement.device

    def per_token(values: Sequence[float]) -> torch.Tensor:
        repeated = np.repeat(np.array(values or [0.0], np.float32), lengths)
        return torch.from_numpy(repeated).to(device)

    def joined(parts: list[NDArray[Any]], dtype: type) -> torch.Tensor:
        whole = np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
        return torch.from_numpy(whole).to(device)

    pairs = [(sample, which) for sample, (which, _) in zip(chosen, owned, strict=True)]
    return MicroBatch(
        samples=tuple(indices),
        token_ids=torch.from_numpy(columns.token_ids).to(device),
        packing=columns.packing,
        scored=joined([index for _, index in owned], np.int64),
        targets=joined([s.token_ids[s.sampled[which]] for s, which in pairs], np.int64),
        lengths=torch.from_numpy(lengths).to(device),
        num_sampled=joined([np.array([len(s.sampled)]) for s in chosen] or [lengths], np.int64),
        rollout_logprobs=joined([s.rollout_logprobs[which] for s, which in pairs], np.float32),
        advantages=per_token([sample.advantage for sample in chosen]),
        weights=per_token([sample.weight for sample in chosen]),
    )


def _columns(chosen: Sequence[SampleArrays], arrangement: Arrangement) -> Columns:
    token_ids = [sample.token_ids for sample in chosen]
    if arrangement.layout == "padded":
        return padded_columns(
            token_ids, device=arrangement.device, length_multiple=arrangement.length_multiple
        )
    return packed_columns(
        token_ids,
        device=arrangement.device,
        length_multiple=arrangement.length_multiple,
        context=(arrangement.context_size, arrangement.context_index, arrangement.context_group),
    )


def scattered(
    of_micro_batch: Sequence[torch.Tensor], batches: Sequence[MicroBatch], num_samples: int
) -> list[torch.Tensor]:
    """Per-token values of all micro-batches -> the values of each sample on this rank."""
    of_sample: list[torch.Tensor] = [torch.zeros(0)] * num_samples
    for values, batch in zip(of_micro_batch, batches, strict=True):
        parts = torch.split(values, batch.lengths.tolist())
        # An empty shard's micro-batch has a length, but no sample.
        for index, part in zip(batch.samples, parts, strict=False):
            of_sample[index] = part
    return of_sample


def gathered(of_sample: Sequence[torch.Tensor], batch: MicroBatch) -> torch.Tensor:
    """Per-token values of samples -> float32[n] in the order of a micro-batch's tokens."""
    parts = [of_sample[index] for index in batch.samples]
    return torch.cat(parts) if parts else torch.zeros_like(batch.rollout_logprobs)
