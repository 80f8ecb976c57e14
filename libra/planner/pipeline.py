"""One-forward-one-backward over micro-batches of different length."""

from collections.abc import Sequence

import msgspec


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of each micro-batch on one stage; both sequences have the same length."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]


def one_forward_one_backward_s(stages: Sequence[StageTimes]) -> float:
    """Time from the first forward to the last backward.

    The schedule of Narayanan et al. 2021 (figure 4): stage s runs `stages - 1 - s` forwards ahead,
    then alternates one forward with one backward, then drains. A pass starts when its stage is free
    and its neighbour has finished the same micro-batch.
    """
    num_stages, num_micro = len(stages), len(stages[0].forward_s)
    ahead = [min(num_stages - 1 - s, num_micro) for s in range(num_stages)]
    free_at = [0.0] * num_stages
    forward_end: list[list[float]] = [[] for _ in range(num_stages)]

    def run_forward(stage: int) -> None:
        micro = len(forward_end[stage])
        ready_at = forward_end[stage - 1][micro] if stage else 0.0
        end = max(free_at[stage], ready_at) + stages[stage].forward_s[micro]
        forward_end[stage].append(end)
        free_at[stage] = end

    for stage in range(num_stages):
        for _ in range(ahead[stage]):
            run_forward(stage)
    for micro in range(num_micro):
        for stage in range(num_stages):
            if len(forward_end[stage]) < min(num_micro, ahead[stage] + micro + 1):
                run_forward(stage)
        ready_at = 0.0
        for stage in reversed(range(num_stages)):
            ready_at = max(free_at[stage], ready_at) + stages[stage].backward_s[micro]
            free_at[stage] = ready_at
    return free_at[0]


def forward_only_s(stages: Sequence[Sequence[float]]) -> float:
    """Time of a forward-only pass; `stages[s][i]` is micro-batch i on stage s, in seconds."""
    ready = [0.0] * len(stages[0])
    for forward_s in stages:
        free_at = 0.0
        for micro, seconds in enumerate(forward_s):
            free_at = max(free_at, ready[micro]) + seconds
            ready[micro] = free_at
    return ready[-1] if ready else 0.0


def bubble_fraction(num_stages: int, num_micro: int) -> float:
    """Share of a stage's time spent idle when all micro-batches are alike (Huang et al. 2019)."""
    return (num_stages - 1) / (num_micro + num_stages - 1)
