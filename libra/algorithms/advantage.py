"""Advantages of trajectories from the rewards of their group.

Groups are told apart by their id, never by position. All arithmetic is in double precision and
in two passes, because the residue of a one-pass variance of equal rewards, divided by itself,
becomes an advantage in the thousands.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from math import fsum, isfinite, sqrt
from typing import assert_never

from libra.config.algorithm import AlgorithmConfig
from libra.errors import InvariantError

FLAT_SPREAD = 1e-6
"""Rewards closer than this, relative to their size and at least absolutely, count as equal."""


def advantages(
    rewards: Sequence[float], group_ids: Sequence[Hashable], config: AlgorithmConfig
) -> list[float]:
    """One advantage per trajectory, in the order given.

    A group of equal rewards, or of one trajectory, gets exactly 0: it says nothing about which
    answer is better. Raises InvariantError for a reward that is not finite; such a trajectory has
    failed and must have been dropped before.
    """
    if broken := [reward for reward in rewards if not isfinite(reward)]:
        raise InvariantError(f"a reward of {broken[0]} reached the advantages of a batch")
    members_of: dict[Hashable, list[int]] = defaultdict(list)
    for index, group_id in enumerate(group_ids):
        members_of[group_id].append(index)
    result = [0.0] * len(rewards)
    for members in members_of.values():
        of_group = group_advantages([float(rewards[index]) for index in members], config)
        for index, advantage in zip(members, of_group, strict=True):
            result[index] = advantage
    return result


def group_advantages(rewards: Sequence[float], config: AlgorithmConfig) -> list[float]:
    """Advantages of one group's trajectories under `config.advantage`.

    grpo: (r - mean) / (std + eps), std with n - 1 (DeepSeekMath, arXiv 2402.03300);
    grpo_population_std: the same with n; dr_grpo: r - mean (arXiv 2503.20783);
    rloo: r - mean of the others (arXiv 2402.14740);
    loo_std: that, over the std of the others + eps where that std is really above 0;
    maxrl: (r - mean) / mean for rewards that are not negative; undivided where the mean is not
    above 0, since the quotient would turn the sign of every advantage.
    """
    if is_flat(rewards):
        return [0.0] * len(rewards)
    if config.advantage == "loo_std":
        return [_leave_one_out(rewards, i, config.advantage_eps) for i in range(len(rewards))]
    mean = _mean(rewards)
    divisor = _divisor(rewards, mean, config)
    return [(reward - mean) / divisor for reward in rewards]


def _divisor(rewards: Sequence[float], mean: float, config: AlgorithmConfig) -> float:
    match config.advantage:
        case "grpo":
            return _std(rewards, ddof=1) + config.advantage_eps
        case "grpo_population_std":
            return _std(rewards, ddof=0) + config.advantage_eps
        case "dr_grpo" | "loo_std":
            return 1.0
        case "rloo":
            return 1 - 1 / len(rewards)
        case "maxrl":
            return mean if mean > 0 else 1.0
        case _:
            assert_never(config.advantage)


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether the rewards of one group are equal for all purposes, or too few to compare."""
    if not rewards:
        return True
    scale = max(1.0, *(abs(reward) for reward in rewards))
    return max(rewards) - min(rewards) < FLAT_SPREAD * scale


def _leave_one_out(rewards: Sequence[float], index: int, eps: float) -> float:
    others = [*rewards[:index], *rewards[index + 1 :]]
    difference = rewards[index] - _mean(others)
    return difference if is_flat(others) else difference / (_std(others, ddof=1) + eps)


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def _std(values: Sequence[float], *, ddof: int) -> float:
    mean = _mean(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))
