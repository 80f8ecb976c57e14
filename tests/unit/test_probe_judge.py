from pathlib import Path

import msgspec
import pytest

from libra.config.environment import Environment
from libra.config.load import LoadedConfig
from libra.models.kv_capacity import GIB
from libra.planner.applied import planned_config
from libra.planner.cost_models import cost_models
from libra.planner.search import plan
from libra.wire.rank import RecomputeProbed
from libra_supervisor.app.launch import Launch
from libra_supervisor.app.probe_judge import ProbeJudge
from libra_supervisor.loop.commands import JudgeProbe
from libra_supervisor.records.calibration import empty_book
from libra_supervisor.run_directory import RunDirectory
from planner_cases import grp_config

GIVEN = grp_config()


def launch(given=GIVEN):
    report = plan(given)
    config = planned_config(given, report.plan)
    return Launch(
        config=config,
        directory=RunDirectory(Path("/runs/r")),
        plan=report.plan,
        given=given,
        report=report,
        book=empty_book(given),
        store=None,
        device="cuda",
        devices=(),
        environ={},
        loaded=LoadedConfig(
            config=given, place_of={}, warnings=(), sources=(), environment=Environment()
        ),
        is_resume=False,
    )


def probes(*rises, error=""):
    return JudgeProbe(
        1,
        tuple(
            RecomputeProbed(rank=rank, before_bytes=GIB, peak_bytes=GIB + rise, error=error)
            for rank, rise in enumerate(rises)
        ),
    )


def judge(command, given=GIVEN):
    learned = []
    judging = ProbeJudge(launch(given), learn=learned.append)
    return judging(command), judging, learned


def test_the_fullest_rank_is_set_beside_the_estimate_and_remembered():
    said, judging, (learned,) = judge(probes(2 * GIB, 3 * GIB))
    assert said.verdict == "kept"
    assert "3.00 GiB measured (peak 4.00 GiB)" in said.message
    assert "estimated beside" in said.message
    assert (learned.operation, learned.measured) == ("recompute_memory", 3 * GIB)
    assert judging.next is None


def test_a_pass_that_rises_too_high_has_the_next_plan_ready():
    memory = cost_models(GIVEN, empty_book(GIVEN)).train_memory
    said, judging, _ = judge(probes(memory.capacity_bytes))
    assert said.verdict == "replaced"
    assert judging.next.report.plan != launch().plan
    assert str(judging.next.report.choice.train) in said.message


def test_a_pinned_split_that_does_not_fit_is_impossible():
    pinned = grp_config(
        planner={"initial_allocation_strategy": "configured"}, training={"train_tp_size": 4}
    )
    said, _, learned = judge(probes(0, error="out of memory"), pinned)
    assert said.verdict == "impossible"
    assert "initial_allocation_strategy: grp" in said.message
    assert len(learned) == 1


@pytest.mark.parametrize(("error", "verdict"), [("", "kept"), ("no memory", "impossible")])
def test_without_a_described_device_there_is_only_what_was_measured(error, verdict):
    bare = msgspec.structs.replace(
        grp_config(planner={"initial_allocation_strategy": "configured"}), hardware=None
    )
    said, _, learned = judge(probes(GIB, error=error), bare)
    assert said.verdict == verdict
    assert learned == []
    assert (error or "1.00 GiB measured") in said.message


def forced(*rises, error=""):
    return msgspec.structs.replace(probes(*rises, error=error), forced=launch().plan.train)


def test_a_layout_that_was_forced_is_judged_by_itself_and_no_other_plan_is_made():
    judged, judging, learned = judge(forced(GIB))
    assert judged.verdict == "kept"
    train = launch().plan.train
    assert f"recompute probe of TP{train.tp} PP{train.pp}" in judged.message
    assert [it.operation for it in learned] == ["recompute_memory"]
    judged, judging, _ = judge(forced(0, error="out of memory"))
    assert judged.verdict == "refused"
    assert "does not fit" in judged.message
    judged, judging, _ = judge(forced(10_000 * GIB))
    assert judged.verdict == "refused"
    assert judging.next is None


def test_a_forced_layout_without_memory_is_refused_where_nothing_is_described():
    undescribed = launch(GIVEN)
    judging = ProbeJudge(msgspec.structs.replace(undescribed, book=None), learn=[].append)
    assert judging(forced(0, error="out of memory")).verdict == "refused"
    assert judging(forced(GIB)).verdict == "kept"
