"""Unbiased pass@k from n samples of one prompt (Codex paper, arXiv 2107.03374)."""

from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of `k` samples drawn without replacement is correct.

    Raises ValueError when `k` samples cannot be drawn.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} cannot be told from {num_samples} samples")
    return 1 - comb(num_samples - num_correct, k) / comb(num_samples, k)
