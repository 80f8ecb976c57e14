"""How long prompts and responses are: a recorded trace, or generated with a long tail."""

from math import exp, log
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from libra.config.run import RunConfig
from libra.errors import ConfigError, DataError
from libra.planner.demand import Demand, observed_demand, prior_demand, prior_mean_tokens


class GroupLengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt and the responses of its samples, in tokens. Also a line of a trace file."""

    prompt_tokens: int
    response_tokens: tuple[int, ...]


class LengthSource(Protocol):
    """Where the simulation takes lengths from."""

    def group(self, index: int, *, step: int, n_samples: int) -> GroupLengths:
        """Lengths of the `index`-th group, started while the policy is at `step`."""
        ...

    def demand(self, config: RunConfig) -> Demand:
        """What a planner that knows these lengths, as they begin, plans for."""
        ...


class GeneratedLengths(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's prior, drawn at random.

    Responses are lognormal: part of the spread is between prompts, part between their samples.

    `growth_per_step` multiplies the mean with every training step: 0.02 makes responses 2 % longer
    each. Every group has its own generator, so the same group has the same lengths whatever the
    order in which groups start.
    """

    seed: int
    mean_tokens: float
    sigma: float
    longest: int
    prompt_tokens: int
    prompt_share: float = 0.5
    """Share of the variance that siblings have in common."""

    growth_per_step: float = 0.0

    def group(self, index: int, *, step: int, n_samples: int) -> GroupLengths:
        rng = np.random.default_rng((self.seed, index))
        mean = self.mean_tokens * exp(log(1 + self.growth_per_step) * step)
        location = log(mean) - self.sigma**2 / 2
        location += self.sigma * self.prompt_share**0.5 * rng.standard_normal()
        own = self.sigma * (1 - self.prompt_share) ** 0.5 * rng.standard_normal(n_samples)
        drawn = np.exp(location + own).round().clip(1, self.longest)
        return GroupLengths(
            prompt_tokens=self.prompt_tokens, response_tokens=tuple(int(n) for n in drawn)
        )

    def demand(self, config: RunConfig) -> Demand:
        return prior_demand(config)


class RecordedLengths:
    """Groups of a trace file in order, over and over; `step` changes nothing."""

    def __init__(self, groups: list[GroupLengths]) -> None:
        self._groups = groups

    def group(
        self,
        index: int,
        *,
        step: int,  # noqa: ARG002 - what was recorded does not drift
        n_samples: int,
    ) -> GroupLengths:
        """A group with fewer responses than samples gives them more than once."""
        found = self._groups[index % len(self._groups)]
        responses = found.response_tokens
        return GroupLengths(
            prompt_tokens=found.prompt_tokens,
            response_tokens=tuple(responses[k % len(responses)] for k in range(n_samples)),
        )

    def demand(self, config: RunConfig) -> Demand:
        pairs = [(g.prompt_tokens, n) for g in self._groups for n in g.response_tokens]
        return observed_demand(config, pairs)


def prior_lengths(config: RunConfig, *, seed: int, growth_per_step: float) -> GeneratedLengths:
    """Raises ConfigError when `growth_per_step` would shrink responses to nothing."""
    if growth_per_step <= -1:
        raise ConfigError(f"--growth {growth_per_step:g} must be above -1")
    planner = config.global_resource_planner
    return GeneratedLengths(
        seed=seed,
        mean_tokens=prior_mean_tokens(config),
        sigma=planner.prior_response_sigma,
        longest=config.rollout.max_new_tokens,
        prompt_tokens=planner.prior_prompt_tokens,
        growth_per_step=growth_per_step,
    )


def read_trace(path: Path, config: RunConfig) -> RecordedLengths:
    """A JSONL file, one `{"prompt_tokens": 120, "response_tokens": [800, 3100]}` per line.

    Responses end where the configuration's engines would end them: at max_new_tokens, or
    max_model_len with the prompt. Raises DataError with path and line when it cannot be read, a
    line is not of that form, or a prompt leaves no room for a response.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise DataError(f"{path}: cannot be read: {exc.strerror}") from exc
    rollout, groups = config.rollout, []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        group = _group(path, number, line)
        longest = min(rollout.max_new_tokens, rollout.max_model_len - group.prompt_tokens)
        if longest < 1:
            raise DataError(
                f"{path}:{number}: a prompt of {group.prompt_tokens} tokens leaves no room for a "
                f"response in max_model_len, {rollout.max_model_len}"
            )
        cut = tuple(min(longest, response) for response in group.response_tokens)
        groups.append(msgspec.structs.replace(group, response_tokens=cut))
    if not groups:
        raise DataError(f"{path}: holds no lengths")
    return RecordedLengths(groups)


def _group(path: Path, number: int, line: bytes) -> GroupLengths:
    try:
        group = msgspec.json.decode(line, type=GroupLengths)
    except msgspec.DecodeError as exc:
        raise DataError(f"{path}:{number}: {exc}") from exc
    if group.prompt_tokens < 1 or min(group.response_tokens, default=0) < 1:
        raise DataError(f"{path}:{number}: lengths must be at least 1, with at least one response")
    return group
