"""What a run needs a server for, should nothing serve. Pure."""

from libra.ids import PolicyVersion
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.run_state import RunState


def need_of_server(state: RunState, at: Moment) -> str:
    """What cannot go on before something serves; empty when nothing is in need, or the run ends."""
    cycle = state.cycle
    if state.evaluator.progress is not None:
        return f"v{cycle.committed} is to be evaluated, and nothing serves"
    step = cycle.next_batch_step(now=at.now)
    if step is None or cycle.phase is Phase.STOPPED or state.desk.is_exhausted:
        return ""
    if cycle.phase is Phase.STARTING:
        return "the trainer starts anew, and nothing serves"
    if state.plans.change is None and not state.plans.plan.hybrids:
        return "no replica is left, and nothing serves"
    if not state.desk.has_batch(PolicyVersion(step - 1)):
        return f"there is no batch for step {step}, and nothing serves"
    return ""


def lead_steps(state: RunState, *, now: float) -> float:
    """How many steps training could go on if nothing served from now on."""
    step = state.cycle.next_batch_step(now=now)
    if step is None:
        return 0.0
    num_batches = state.desk.num_batches(PolicyVersion(step - 1))
    until_evaluation = state.cycle.num_steps_until_evaluation
    return float(num_batches if until_evaluation is None else min(num_batches, until_evaluation))
