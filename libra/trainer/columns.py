"""Where the tokens of several sequences stand in the columns of one forward pass.

Padded: a row per sequence, as long as the longest. Packed: all sequences behind each other in one
row, each a causal world of its own; nothing is computed for padding. Under context parallelism
every sequence is cut into 2c equal pieces and rank r of c holds pieces r and 2c-1-r, so that all
ranks have the same share of the causal triangle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Spans:
    """Packed queries and keys by sequence. The last query of each sees the last key of each."""

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    query_boundaries: torch.Tensor
    """int32[m + 1]: cumulative lengths, as kernels want them."""

    key_boundaries: torch.Tensor


@dataclass(frozen=True)
class HalfShare:
    """The queries of one of this rank's two pieces of every sequence, and the keys they see."""

    queries: torch.Tensor
    """int64[q]: columns of this rank."""

    keys: torch.Tensor
    """int64[k]: columns of all context ranks, gathered in order."""

    spans: Spans


@dataclass(frozen=True)
class ContextShare:
    """One context rank's part of packed sequences."""

    group: Any
    halves: tuple[HalfShare, HalfShare]
    restore: torch.Tensor
    """int64[s]: the two halves' results, one behind the other, back into this rank's columns."""


@dataclass(frozen=True)
class Packing:
    """What attention and rotary positions need to know about the columns.

    Megatron hands it through as its own `packed_seq_params`, of which it must look like the plain
    "sbhd" form, so that Megatron itself does nothing about packing.
    """

    positions: torch.Tensor
    """int64[s]: position of each column's token in its own sequence."""

    longest: int
    """Length of the longest sequence, padding included."""

    spans: Spans | None = None
    """Of packed sequences that are whole on this rank; None for padded rows."""

    context: ContextShare | None = None
    qkv_format: str = "sbhd"
    cp_group: None = None
    """None: Megatron must not cut rotary positions, which are this rank's already."""


@dataclass(frozen=True)
class Columns:
    """Sequences laid out, and where to find their positions again."""

    token_ids: NDArray[np.int64]
    """[b, s]"""

    packing: Packing
    starts: tuple[int, ...]
    """Index of each sequence's first token here into the flattened [s, b]."""

    stride: int
    """Between neighbouring positions of a sequence in the flattened [s, b]."""

    pieces: tuple[tuple[int, int], ...] = ()
    """Under context parallelism: first position of the two pieces of each sequence."""

    def scored_here(
        self, sequence: int, sampled: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which of the sampled tokens are predicted on this rank, and from which index.

        `sampled` are positions in the sequence; token t is predicted at position t - 1.
        """
        predicting = sampled - 1
        if not self.pieces:
            which = np.arange(len(sampled))
            return which, self.starts[sequence] + predicting * self.stride
        first, second = self.pieces[sequence]
        width = self._piece_width(sequence)
        in_first = (predicting >= first) & (predicting < first + width)
        in_second = (predicting >= second) & (predicting < second + width)
        local = np.where(in_first, predicting - first, predicting - second + width)
        which = np.flatnonzero(in_first | in_second)
        return which, self.starts[sequence] + local[which]

    def _piece_width(self, sequence: int) -> int:
        share = self.packing.context
        assert share is not None  # noqa: S101 - pieces exist only with a share
        return share.halves[0].spans.query_lengths[sequence]


def padded_columns(
    sequences: Sequence[NDArray[np.int32]], *, device: torch.device, length_multiple: int
) -> Columns:
    """A row per sequence, padded on the right; one row of padding when there is none."""
    num_rows = max(len(sequences), 1)
    longest = max((len(tokens) for tokens in sequences), default=1)
    num_columns = _rounded_up(longest, length_multiple)
    token_ids = np.zeros((num_rows, num_columns), np.int64)
    for row, tokens in enumerate(sequences):
        token_ids[row, : len(tokens)] = tokens
    return Columns(
        token_ids=token_ids,
        packing=Packing(positions=torch.arange(num_columns, device=device), longest=num_columns),
        starts=tuple(range(len(sequences))),
        stride=num_rows,
    )


def packed_columns(
    sequences: Sequence[NDArray[np.int32]],
    *,
    device: torch.device,
    length_multiple: int,
    context: tuple[int, int, Any],
) -> Columns:
    """All sequences in one row; `context` is size, index and group of context parallelism.

    A sequence of padding at the end makes up the multiple, and a row when there is no sequence.
    """
    size, index, _ = context
    unit = 1 if size == 1 else 2 * size
    lengths = [_rounded_up(len(tokens), unit) for tokens in sequences]
    lengths += _filler(sum(lengths), unit=unit, multiple=length_multiple * size)
    whole = [np.zeros(length, np.int64) for length in lengths]
    for row, tokens in zip(whole, sequences, strict=False):
        row[: len(tokens)] = tokens
    # The two pieces of this rank, which without context parallelism are one whole sequence.
    cuts = [_pieces(length, size, index) for length in lengths]
    ids = [row[part] for row, parts in zip(whole, cuts, strict=True) for part in parts]
    positions = [np.arange(p.start, p.stop) for parts in cuts for p in parts]
    local_lengths = [length // size for length in lengths]
    packing = Packing(
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        longest=max(lengths),
        spans=_spans(lengths, lengths, device) if size == 1 else None,
        context=_context_share(lengths, context, device) if size > 1 else None,
    )
    return Columns(
        token_ids=np.concatenate(ids)[None],
        packing=packing,
        starts=tuple(accumulate(local_lengths, initial=0))[: len(sequences)],
        stride=1,
        pieces=tuple((parts[0].start, parts[-1].start) for parts in cuts) if size > 1 else (),
    )


def _filler(total: int, *, unit: int, multiple: int) -> list[int]:
    """Length of a sequence of padding after which `multiple` divides the total; or nothing."""
    if total and total % multiple == 0:
        return []
    length = unit
    while (total + length) % multiple:
        length += unit
    return [length]


def _pieces(length: int, size: int, index: int) -> list[slice]:
    if size == 1:
        return [slice(0, length)]
    width = length // (2 * size)
    return [slice(at * width, (at + 1) * width) for at in (index, 2 * size - 1 - index)]


def _context_share(
    lengths: Sequence[int], context: tuple[int, int, Any], device: torch.device
) -> ContextShare:
    size, index, group = context
    starts = [0, *accumulate(length // size for length in lengths)]
    num_local = starts[-1]
    widths = [length // (2 * size) for length in lengths]

    def column(sequence: int, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where a position stands among the gathered columns of all ranks."""
        width = widths[sequence]
        piece, within = np.divmod(position, width)
        rank = np.minimum(piece, 2 * size - 1 - piece)
        in_second = (piece >= size).astype(np.int64)
        where: NDArray[np.int64] = rank * num_local + starts[sequence] + in_second * width + within
        return where

    def half(which: int) -> HalfShare:
        piece = (index, 2 * size - 1 - index)[which]
        queries = [
            np.arange(s + which * w, s + (which + 1) * w)
            for s, w in zip(starts, widths, strict=False)
        ]
        seen = [(piece + 1) * width for width in widths]
        keys = [column(at, np.arange(count)) for at, count in enumerate(seen)]
        return HalfShare(
            queries=torch.from_numpy(np.concatenate(queries)).to(device),
            keys=torch.from_numpy(np.concatenate(keys)).to(device),
            spans=_spans(widths, seen, device),
        )

    halves = (half(0), half(1))
    order = torch.cat([halves[0].queries, halves[1].queries])
    return ContextShare(group=group, halves=halves, restore=torch.argsort(order))


def _spans(queries: Sequence[int], keys: Sequence[int], device: torch.device) -> Spans:
    boundaries = [
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        for lengths in (queries, keys)
    ]
    return Spans(tuple(queries), tuple(keys), *boundaries)


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
