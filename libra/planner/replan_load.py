"""What plans are priced for: the lengths observed, or the configured prior."""

from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from libra.config.run import RunConfig
from libra.planner.calibration import Calibration
from libra.planner.cost_models import cost_models
from libra.planner.demand import Demand, observed_demand, prior_demand
from libra.planner.lending import serves_nothing
from libra.planner.plan import Plan
from libra.planner.replan_candidates import Bounds, Candidate, CandidateSearch, expected_step_s
from libra.planner.replan_observed import StepObserved


class Looked(msgspec.Struct, frozen=True, kw_only=True):
    """All plans that the run could go over to."""

    candidates: tuple[Candidate, ...]
    left_out: tuple[str, ...]
    """What keeps the run from others, each only once."""


class ObservedLoad:
    """One demand, or that of each sort of steps."""

    def __init__(
        self, config: RunConfig, sorts: Sequence[Sequence[StepObserved]], book: Calibration
    ) -> None:
        """`config` describes hardware and model; without `sorts` its prior is the demand."""
        self._config, self._book = config, book
        self._models = cost_models(config, book)
        self._demands = [_demand_of(config, steps) for steps in sorts or ((),)]
        self._weights = [len(steps) for steps in sorts] or [1]
        num_apart = [f"{len(steps)} steps" for steps in sorts] if len(sorts) > 1 else []
        self.source = _demand_of(config, [step for steps in sorts for step in steps]).source
        """In words."""

        if num_apart:
            self.source += f", shorter ones of {' and longer ones of '.join(num_apart)}"

    def step_s(self, plan: Plan) -> float:
        """Expected of a plan that has an instance, in the mean over all steps."""
        each = [expected_step_s(self._config, plan, it, self._models) for it in self._demands]
        return fmean(each, self._weights)

    def candidates(
        self, plan: Plan, bounds: Bounds, *, why_not: Callable[[Plan], str], lead_steps: float
    ) -> Looked:
        """The best plans for each sort, with the step time that is expected over all."""
        searches = [
            CandidateSearch(
                self._config,
                plan,
                demand,
                self._book,
                bounds,
                why_not=why_not,
                lead_steps=lead_steps,
            )
            for demand in self._demands
        ]
        found = [candidate for search in searches for candidate in search.candidates()]
        if len(searches) > 1:
            different = {candidate.plan: candidate for candidate in found}
            found = [
                msgspec.structs.replace(it, step_s=self.step_s(it.plan))
                for it in different.values()
                if not serves_nothing(it.plan)
            ]
        left_out = dict.fromkeys(why for search in searches for why in search.left_out)
        return Looked(candidates=tuple(found), left_out=tuple(left_out))


def _demand_of(config: RunConfig, steps: Sequence[StepObserved]) -> Demand:
    lengths = [pair for step in steps for pair in step.lengths]
    if not lengths:
        return prior_demand(config)
    found = observed_demand(config, lengths)
    return msgspec.structs.replace(found, source=f"{found.source} of {len(steps)} steps")
