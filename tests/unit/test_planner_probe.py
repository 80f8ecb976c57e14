import msgspec
import pytest

from libra.errors import InfeasiblePlanError
from libra.planner.calibration import Calibration, Observation, observe
from libra.planner.cost_models import cost_models
from libra.planner.demand import prior_demand
from libra.planner.probe import (
    KeepPlan,
    ProbedRun,
    ProbeMeasured,
    ProbeOutOfMemory,
    SwitchPlan,
    on_probe,
)
from libra.planner.search import plan
from planner_cases import grp_config

NOTHING_MEASURED = Calibration(hardware="NVIDIA A100-SXM4-80GB", model="Qwen3ForCausalLM")


def planned(config):
    return ProbedRun(
        config=config,
        report=plan(config),
        calibration=NOTHING_MEASURED,
        demand=prior_demand(config),
    )


def measured(rise_bytes):
    return ProbeMeasured(rise_bytes=rise_bytes, peak_bytes=10**9 + rise_bytes)


def estimated_peak(run):
    memory = cost_models(run.config, run.calibration).train_memory
    return memory.recompute_peak_bytes(run.report.choice.train)


def test_a_probe_that_confirms_the_estimate_keeps_the_plan():
    run = planned(grp_config())
    static, estimated = estimated_peak(run)
    decision = on_probe(run, measured(estimated - static))
    assert isinstance(decision, KeepPlan)
    assert decision.calibration.ratio("recompute_memory") == pytest.approx(1)
    assert "measured" in decision.message
    assert "estimated" in decision.message


def test_a_smaller_peak_is_remembered_for_the_next_plan():
    run = planned(grp_config())
    static, estimated = estimated_peak(run)
    decision = on_probe(run, measured((estimated - static) // 2))
    assert decision.calibration.ratio("recompute_memory") == pytest.approx(0.5, rel=1e-3)


def test_running_out_of_memory_leads_to_another_plan_instead_of_an_end():
    run = planned(grp_config())
    decision = on_probe(run, ProbeOutOfMemory())
    assert isinstance(decision, SwitchPlan)
    assert decision.report.choice.train != run.report.choice.train
    assert run.report.choice.train in decision.excluded
    assert "does not fit, going on with" in decision.message


def test_when_nothing_is_left_the_end_names_every_reason():
    run = planned(
        grp_config(
            num_gpus=16,
            planner={"allowed_train_tp": [8], "allowed_train_pp": [1]},
            training={"micro_batch_size": 16},
            batch_size=16,
            max_new_tokens=1024,
        )
    )
    with pytest.raises(InfeasiblePlanError, match="recompute-logprobs temporaries"):
        on_probe(run, ProbeOutOfMemory())


def test_a_peak_that_needs_more_than_the_device_has_is_not_averaged_away():
    """Twenty earlier probes that fitted say less than this one."""
    run = planned(grp_config())
    static, _ = estimated_peak(run)
    book = NOTHING_MEASURED
    for _ in range(20):
        book = observe(book, Observation(operation="recompute_memory", predicted=1.0, measured=1.0))
    known = msgspec.structs.replace(run, calibration=book)
    capacity = cost_models(run.config, book).train_memory.capacity_bytes
    decision = on_probe(known, measured(capacity - static))
    assert isinstance(decision, SwitchPlan)


def test_the_layout_that_failed_is_left_out_with_that_reason():
    run = planned(grp_config())
    static, _ = estimated_peak(run)
    capacity = cost_models(run.config, NOTHING_MEASURED).train_memory.capacity_bytes
    decision = on_probe(run, measured(capacity - static - 2**30))
    assert isinstance(decision, SwitchPlan)
    assert decision.report.choice.train not in decision.excluded


def test_what_did_not_rise_teaches_nothing():
    run = planned(grp_config())
    decision = on_probe(run, measured(0))
    assert isinstance(decision, KeepPlan)
    assert decision.calibration == NOTHING_MEASURED


def test_a_configured_split_that_does_not_fit_is_said_to_and_not_changed():
    config = grp_config(
        planner={"initial_allocation_strategy": "configured"}, training={"train_tp_size": 4}
    )
    with pytest.raises(InfeasiblePlanError, match="the configured split does not fit"):
        on_probe(planned(config), ProbeOutOfMemory())
