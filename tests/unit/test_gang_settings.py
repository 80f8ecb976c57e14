"""What a gang's attempt is started with, and how long its end may take."""

import os
from pathlib import Path

import pytest

from libra.config.supervision import SupervisionConfig
from libra.ids import Incarnation, RunId, SlotId
from libra.planner.plan import TrainPlacement
from libra.trainer.__main__ import bind_to_device
from libra_supervisor.ranks.gang import gang_deadlines
from libra_supervisor.ranks.torchrun import Attempt, GangSite, attempt_spec
from libra_supervisor.run_directory import RunDirectory

KILL_WAIT_OF_SLURM_S = 30


def spec(**changes):
    site = GangSite(
        run_id=RunId("r"),
        directory=RunDirectory(Path("/r")),
        placement=TrainPlacement(tp=1, pp=1, cp=1, ep=1, dp=2, slots=(SlotId(0), SlotId(1))),
        device="cuda",
        env={},
        **changes,
    )
    attempt = Attempt(
        number=1,
        incarnation=Incarnation("trainer-1"),
        control_socket="/r/ranks.sock",
        restore=None,
        shutdown_grace_s=4.0,
    )
    return attempt_spec(site, attempt)


@pytest.mark.case("R-B97")
def test_the_end_of_a_gang_fits_into_what_slurm_allows():
    stop = gang_deadlines(SupervisionConfig()).stop
    assert stop.term_grace_s + stop.kill_wait_s < KILL_WAIT_OF_SLURM_S
    short = gang_deadlines(SupervisionConfig(term_grace_s=2.0)).stop
    assert short.term_grace_s == 2, "as configured when that is less"


def test_each_rank_is_told_the_cores_beside_its_device():
    assert spec(rank_cores=((0, 1), (2, 3))).env["LIBRA_RANK_CORES"] == "0,1;2,3"
    assert spec(rank_cores=((), (2, 3))).env["LIBRA_RANK_CORES"] == ";2,3"
    assert "LIBRA_RANK_CORES" not in spec(rank_cores=((), ())).env
    assert "LIBRA_RANK_CORES" not in spec().env


def test_a_rank_binds_itself_to_its_cores():
    before = os.sched_getaffinity(0)
    core = min(before)
    try:
        bind_to_device("", 1)
        bind_to_device(f"{core};", 1)
        assert os.sched_getaffinity(0) == before
        bind_to_device(f";{core}", 1)
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, before)
