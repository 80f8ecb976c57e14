"""When a change of the plan is worth it.

A change is paid once and earns in every step, so it is taken when

    horizon_steps x sure_gain_s > cost_s + z x deviation of the cost

The horizon is `runtime_payback_steps`, or what is left of the run. The gain is what the model
expects, in the seconds that steps really take under the plan in force, and made smaller twice by
the model's own error there: by its bias, and by what the steps measured so far cannot tell apart.
"""

from math import sqrt
from typing import Final

import msgspec

from libra.planner.replan_costs import SwitchCost
from libra.planner.replan_observed import StepTimes

_COST_DEVIATIONS: Final = 2.0
_LEAST_ERROR = 0.02
"""Step times this close are within what the model can tell apart, however many were measured."""

_UNKNOWN_ERROR = 0.1
"""Before two steps have been timed under the plan in force."""

_FEWEST_TIMES = 2


class ModelError(msgspec.Struct, frozen=True, kw_only=True):
    """The model beside the steps measured under the plan in force."""

    bias: float
    """Measured over expected step time; 1.0 while nothing was measured."""

    fraction: float
    """Of a step time, what may be noise."""


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """The two sides of the rule, and what they come from."""

    step_s: float
    """Under the plan in force."""

    candidate_step_s: float
    """In the same seconds: both have the model's bias taken out."""

    sure_gain_s: float
    """Per step; below 0 when the difference may be the model's error."""

    horizon_steps: float
    cost: SwitchCost
    error: ModelError

    @property
    def earned_s(self) -> float:
        return self.horizon_steps * self.sure_gain_s

    @property
    def price_s(self) -> float:
        return self.cost.mean_s + _COST_DEVIATIONS * self.cost.deviation_s

    @property
    def net_s(self) -> float:
        return self.earned_s - self.price_s

    @property
    def is_enough(self) -> bool:
        return self.net_s > 0

    def numbers(self) -> dict[str, float]:
        return {
            "step_s": self.step_s,
            "candidate_step_s": self.candidate_step_s,
            "gain_s": self.step_s - self.candidate_step_s,
            "sure_gain_s": self.sure_gain_s,
            "horizon_steps": self.horizon_steps,
            "earned_s": self.earned_s,
            "cost_s": self.cost.mean_s,
            "cost_deviation_s": self.cost.deviation_s,
            "num_costs_measured": float(self.cost.num_measured),
            "price_s": self.price_s,
            "model_bias": self.error.bias,
            "model_error_fraction": self.error.fraction,
        }

    def in_words(self) -> str:
        return (
            f"{self.candidate_step_s:.1f} s a step for {self.step_s:.1f} s; after the model's "
            f"error of {self.error.fraction:.0%} {self.sure_gain_s:+.2f} s a step are sure, "
            f"{self.earned_s:+.0f} s in {self.horizon_steps:.0f} steps; the change costs "
            f"{self.price_s:.0f} s ({self.cost.mean_s:.0f} s and "
            f"{_COST_DEVIATIONS:g} x {self.cost.deviation_s:.0f} s of uncertainty, "
            f"{_measured(self.cost.num_measured)})"
        )


def model_error(*, expected_s: float, times: StepTimes | None) -> ModelError:
    """What the steps under the plan in force say about the model."""
    if times is None:
        return ModelError(bias=1.0, fraction=_UNKNOWN_ERROR)
    bias = times.mean_s / expected_s
    if times.num_steps < _FEWEST_TIMES:
        return ModelError(bias=bias, fraction=_UNKNOWN_ERROR)
    noise = times.deviation_s / times.mean_s / sqrt(times.num_steps)
    return ModelError(bias=bias, fraction=max(_LEAST_ERROR, noise))


def worth(
    *,
    expected_s: float,
    candidate_s: float,
    error: ModelError,
    cost: SwitchCost,
    horizon_steps: float,
) -> Worth:
    """`expected_s` and `candidate_s` are the model's step times as they are."""
    step_s, candidate_step_s = error.bias * expected_s, error.bias * candidate_s
    gain_s = (step_s - candidate_step_s) / (1 + abs(error.bias - 1))
    return Worth(
        step_s=step_s,
        candidate_step_s=candidate_step_s,
        sure_gain_s=gain_s - error.fraction * step_s,
        horizon_steps=horizon_steps,
        cost=cost,
        error=error,
    )


def _measured(num_measured: int) -> str:
    return f"from {num_measured} measured" if num_measured else "none measured yet"
