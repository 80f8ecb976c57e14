"""Loads that change while the run goes on: what prompts and responses are like, phase by phase."""

from collections.abc import Sequence
from math import exp, log
from pathlib import Path

import msgspec
from msgspec.structs import replace

from libra.config.run import RunConfig
from libra.errors import DataError
from libra.planner.demand import Demand, prior_demand
from libra.simulate.lengths import GeneratedLengths, GroupLengths


class Phase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lengths from a step on, until the next phase. Also a line of a drift file."""

    from_step: int
    prompt_tokens: int
    response_mean_tokens: float
    response_sigma: float
    ramp_steps: int = 0
    """Steps over which the phase before goes over into this one; 0 is a jump."""


class DriftingLengths(msgspec.Struct, frozen=True, kw_only=True):
    """`LengthSource` of generated lengths whose parameters follow the phases."""

    seed: int
    longest: int
    phases: tuple[Phase, ...]
    """The first begins at step 0, the others later and later."""

    def group(self, index: int, *, step: int, n_samples: int) -> GroupLengths:
        return self._source(self.at(step)).group(index, step=step, n_samples=n_samples)

    def demand(self, config: RunConfig) -> Demand:
        return self.demand_of(self.phases[0], config)

    def demand_of(self, phase: Phase, config: RunConfig) -> Demand:
        """What a planner plans for that knows the phase."""
        planner = replace(
            config.global_resource_planner,
            prior_prompt_tokens=phase.prompt_tokens,
            prior_response_mean_tokens=max(1, round(phase.response_mean_tokens)),
            prior_response_sigma=phase.response_sigma,
        )
        return prior_demand(replace(config, global_resource_planner=planner))

    def at(self, step: int) -> Phase:
        """What lengths are like when the policy is at `step`; in a ramp something in between."""
        index = max(k for k, phase in enumerate(self.phases) if phase.from_step <= step)
        phase = self.phases[index]
        share = (step - phase.from_step) / phase.ramp_steps if phase.ramp_steps else 1.0
        if index == 0 or share >= 1:
            return phase
        before = self.phases[index - 1]
        return Phase(
            from_step=phase.from_step,
            prompt_tokens=round(_between(before.prompt_tokens, phase.prompt_tokens, share)),
            response_mean_tokens=_between(
                before.response_mean_tokens, phase.response_mean_tokens, share
            ),
            response_sigma=before.response_sigma
            + share * (phase.response_sigma - before.response_sigma),
        )

    def _source(self, phase: Phase) -> GeneratedLengths:
        return GeneratedLengths(
            seed=self.seed,
            mean_tokens=phase.response_mean_tokens,
            sigma=phase.response_sigma,
            longest=self.longest,
            prompt_tokens=phase.prompt_tokens,
        )


def read_drift(path: Path, config: RunConfig, *, seed: int) -> DriftingLengths:
    """A JSONL file, one phase per line, by `from_step`.

    Raises DataError with path and line when it cannot be read, a line is no phase, prompts leave no
    room for a response, or the first phase does not begin at step 0.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise DataError(f"{path}: cannot be read: {exc.strerror}") from exc
    phases: list[Phase] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            phases.append(_phase(line, phases, config, f"{path}:{number}"))
    if not phases:
        raise DataError(f"{path}: holds no phases")
    return DriftingLengths(seed=seed, longest=config.rollout.max_new_tokens, phases=tuple(phases))


def _phase(line: bytes, before: Sequence[Phase], config: RunConfig, place: str) -> Phase:
    try:
        phase = msgspec.json.decode(line, type=Phase)
    except msgspec.DecodeError as exc:
        raise DataError(f"{place}: {exc}") from exc
    longest = config.rollout.max_model_len - config.rollout.max_new_tokens
    problems = {
        "response_mean_tokens must be at least 1": phase.response_mean_tokens < 1,
        "response_sigma must be at least 0": phase.response_sigma < 0,
        "ramp_steps must be at least 0": phase.ramp_steps < 0,
        f"prompt_tokens must be from 1 to max_model_len - max_new_tokens, {longest}": not (
            1 <= phase.prompt_tokens <= longest
        ),
        "the first phase begins at step 0": not before and phase.from_step != 0,
        "from_step must be above the one before": bool(before)
        and phase.from_step <= before[-1].from_step,
    }
    if found := next((what for what, is_so in problems.items() if is_so), None):
        raise DataError(f"{place}: {found}")
    return phase


def _between(low: float, high: float, share: float) -> float:
    """In equal ratios."""
    return exp(log(low) + share * (log(high) - log(low)))
