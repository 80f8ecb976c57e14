"""The recompute probe of the real ranks beside the plan: keep it, or have the next one ready."""

from collections.abc import Callable
from typing import Literal

from libra.errors import InfeasiblePlanError
from libra.models.kv_capacity import GIB
from libra.planner.calibration import Observation
from libra.planner.demand import prior_demand
from libra.planner.plan import TrainPlacement
from libra.planner.pricing import layout_of
from libra.planner.probe import (
    KeepPlan,
    ProbedRun,
    ProbeMeasured,
    ProbeOutcome,
    ProbeOutOfMemory,
    SwitchPlan,
    on_forced_probe,
    on_probe,
    probe_observation,
)
from libra.wire.rank import RecomputeProbed
from libra_supervisor.app.launch import Launch
from libra_supervisor.events import ProbeJudged
from libra_supervisor.loop.commands import JudgeProbe


class ProbeJudge:
    """`libra_supervisor.loop.execute.JudgeProbe`. Blocks: call it in a thread."""

    def __init__(self, launch: Launch, *, learn: Callable[[Observation], None]) -> None:
        self.next: SwitchPlan | None = None
        """The plan to go on with, once the present one was found not to fit."""

        self._launch = launch
        self._learn = learn

    def __call__(self, command: JudgeProbe) -> ProbeJudged:
        outcome = outcome_of(command.probes)
        if self._launch.book is None:
            return self._without_estimate(command, outcome)
        run = ProbedRun(
            config=self._launch.given,
            report=self._launch.report,
            calibration=self._launch.book,
            demand=prior_demand(self._launch.given),
            excluded=self._launch.excluded,
        )
        if command.forced is not None:
            return self._forced(command, run, command.forced, outcome)
        observation = probe_observation(run, outcome)
        if observation is not None:
            self._learn(observation)
        try:
            decision = on_probe(run, outcome)
        except InfeasiblePlanError as error:
            return ProbeJudged(command.attempt, "impossible", str(error))
        if isinstance(decision, KeepPlan):
            return ProbeJudged(command.attempt, "kept", decision.message)
        self.next = decision
        return ProbeJudged(command.attempt, "replaced", decision.message)

    def _forced(
        self, command: JudgeProbe, run: ProbedRun, train: TrainPlacement, outcome: ProbeOutcome
    ) -> ProbeJudged:
        """Of a layout that the loss of a node forced on the run."""
        layout = layout_of(train, micro_batch_size=run.config.training.micro_batch_size)
        observation = probe_observation(run, outcome, layout)
        if observation is not None:
            self._learn(observation)
        judged = on_forced_probe(run, layout, outcome)
        verdict: Literal["kept", "refused"] = "kept" if judged.fits else "refused"
        return ProbeJudged(command.attempt, verdict, judged.message)

    def _without_estimate(self, command: JudgeProbe, outcome: ProbeOutcome) -> ProbeJudged:
        """The plan can neither be compared nor replaced while the device is not described."""
        if isinstance(outcome, ProbeMeasured):
            said = (
                f"recompute probe: {outcome.rise_bytes / GIB:.2f} GiB measured (peak "
                f"{outcome.peak_bytes / GIB:.2f} GiB); hardware is not described, so there is no "
                "estimate"
            )
            return ProbeJudged(command.attempt, "kept", said)
        first = next(probed.error for probed in command.probes if probed.error)
        verdict: Literal["impossible", "refused"] = "impossible"
        if command.forced is not None:
            verdict = "refused"
        return ProbeJudged(command.attempt, verdict, first)


def outcome_of(probes: tuple[RecomputeProbed, ...]) -> ProbeOutcome:
    """The worst of the ranks."""
    if any(probed.error for probed in probes):
        return ProbeOutOfMemory()
    return ProbeMeasured(
        rise_bytes=max(probed.peak_bytes - probed.before_bytes for probed in probes),
        peak_bytes=max(probed.peak_bytes for probed in probes),
    )
