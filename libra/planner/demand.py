"""What one training step asks for: a prompt and a response length per trajectory."""

from collections.abc import Iterable, Sequence
from math import exp, log
from statistics import NormalDist

import msgspec

from libra.config.run import RunConfig
from libra.errors import InvariantError

_DERIVED_MEAN_SHARE = 0.4
"""Share of max_new_tokens taken as the mean response when the configuration names none."""

_MOST_BATCHES = 8


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectories of one training step, in no order that matters."""

    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    """Same length as `prompt_tokens`; pairs belong together."""

    source: str
    """Where the lengths come from, for people."""

    prefill_share: float = 1.0
    """Prompt tokens really computed: 1 / n_samples when siblings share one prefix cache."""

    num_batches: int = 1
    """Steps' worth of trajectories in flight together: what staleness and concurrency allow."""

    def __post_init__(self) -> None:
        if not self.prompt_tokens or len(self.prompt_tokens) != len(self.response_tokens):
            raise InvariantError(
                f"demand has {len(self.prompt_tokens)} prompts and {len(self.response_tokens)} "
                "responses; there must be one of each per trajectory"
            )

    @property
    def num_sequences(self) -> int:
        return len(self.prompt_tokens)

    @property
    def num_response_tokens(self) -> int:
        return sum(self.response_tokens)


def prior_demand(config: RunConfig) -> Demand:
    """The configured prior: one prompt length, lognormal responses cut at max_new_tokens.

    Lengths are the quantiles (k + 1/2) / batch_size, so equal configurations give equal plans.
    """
    planner, rollout = config.global_resource_planner, config.rollout
    mean = prior_mean_tokens(config)
    num_sequences = config.training.batch_size
    return Demand(
        prompt_tokens=(planner.prior_prompt_tokens,) * num_sequences,
        response_tokens=tuple(
            lognormal_quantiles(
                num_sequences,
                mean=mean,
                sigma=planner.prior_response_sigma,
                longest=rollout.max_new_tokens,
            )
        ),
        source=f"prior: mean {mean:.0f} response tokens, sigma {planner.prior_response_sigma:g}",
        prefill_share=prefill_share(config),
        num_batches=num_batches_in_flight(config),
    )


def prior_mean_tokens(config: RunConfig) -> float:
    """Mean response of the prior, before the cut."""
    given = config.global_resource_planner.prior_response_mean_tokens
    return given or _DERIVED_MEAN_SHARE * config.rollout.max_new_tokens


def observed_demand(config: RunConfig, lengths: Sequence[tuple[int, int]]) -> Demand:
    """One step's demand from observed (prompt, response) lengths: their quantiles by response.

    Lengths of another run may be more than max_model_len allows here: responses are then cut, as an
    engine would, and `source` says how many. Raises InvariantError when nothing was observed.
    """
    if not lengths:
        raise InvariantError("observed_demand needs at least one finished trajectory")
    limit = config.rollout.max_model_len
    kept = [(min(prompt, limit - 1), response) for prompt, response in lengths]
    kept = [(prompt, min(response, limit - prompt)) for prompt, response in kept]
    num_cut = sum(new != old for new, old in zip(kept, lengths, strict=True))
    ordered = sorted(kept, key=lambda pair: (pair[1], pair[0]))
    num = config.training.batch_size
    picked = [ordered[(2 * k + 1) * len(ordered) // (2 * num)] for k in range(num)]
    return Demand(
        prompt_tokens=tuple(prompt for prompt, _ in picked),
        response_tokens=tuple(response for _, response in picked),
        source=f"observed: {len(lengths)} trajectories"
        + (f", {num_cut} of them cut at max_model_len {limit}" if num_cut else ""),
        prefill_share=prefill_share(config),
        num_batches=num_batches_in_flight(config),
    )


def lognormal_quantiles(
    num_values: int, *, mean: float, sigma: float, longest: int
) -> Iterable[int]:
    """Evenly spaced quantiles, each at least 1 and at most `longest`; `mean` is before the cut."""
    normal = NormalDist()
    location = log(mean) - sigma**2 / 2
    for index in range(num_values):
        quantile = normal.inv_cdf((index + 0.5) / num_values)
        yield max(1, min(longest, round(exp(location + sigma * quantile))))


def prefill_share(config: RunConfig) -> float:
    if config.heterogeneous_rollout.scheduling.prefix_affinity:
        return 1.0 / config.algorithm.n_samples
    return 1.0


def num_batches_in_flight(config: RunConfig) -> int:
    """How many batches rollout may work on at a time; more than `_MOST_BATCHES` change nothing."""
    by_concurrency = config.rollout.max_concurrent_rollouts // config.training.batch_size
    by_staleness = config.rollout.max_head_offpolicyness + 1
    return max(1, int(min(by_concurrency, by_staleness, _MOST_BATCHES)))
