"""The soft penalty for responses near the length limit (DAPO, arXiv 2503.14476)."""


def overlong_penalty(num_tokens: int, *, max_tokens: int, cache_tokens: int) -> float:
    """Return what to add to the reward: 0 up to `max_tokens - cache_tokens`, then down to -1.

    Linear, and never below -1; without a cache it is the hard step at the limit.
    """
    excess = num_tokens - (max_tokens - cache_tokens)
    if excess <= 0:
        return 0.0
    return -min(1.0, excess / cache_tokens) if cache_tokens else -1.0
