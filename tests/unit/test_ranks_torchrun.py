import os

import pytest

from libra.ids import SlotId
from libra.planner.plan import TrainPlacement
from libra_supervisor.ranks.torchrun import Attempt, GangSite, attempt_spec
from libra_supervisor.run_directory import RunDirectory


def environment_of(tmp_path, *, device, num_ranks, cpu_cores=(), rank_cores=(), visible_devices=()):
    slots = tuple(map(SlotId, range(num_ranks)))
    site = GangSite(
        run_id="run-1",
        directory=RunDirectory(tmp_path),
        placement=TrainPlacement(tp=1, pp=1, cp=1, ep=1, dp=num_ranks, slots=slots),
        device=device,
        env={"PATH": "/bin"},
        cpu_cores=cpu_cores,
        rank_cores=rank_cores,
        visible_devices=visible_devices,
    )
    attempt = Attempt(
        number=0, incarnation="a", control_socket="/run/control", restore=None, shutdown_grace_s=1
    )
    return attempt_spec(site, attempt).env


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "threads"), [(4, 2, "2"), (4, 8, "1"), (0, 1, "1")]
)
def test_ranks_on_the_cpu_share_the_cores_they_are_bound_to(
    tmp_path, num_cores, num_ranks, threads
):
    cores = tuple(range(num_cores))
    env = environment_of(tmp_path, device="cpu", num_ranks=num_ranks, cpu_cores=cores)
    assert env["OMP_NUM_THREADS"] == threads
    assert "THP_MEM_ALLOC_ENABLE" not in env


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "threads"), [(32, 1, "8"), (32, 8, "4"), (4, 8, "1")]
)
def test_ranks_with_gpus_have_a_few_threads_and_huge_pages_to_save_with(
    tmp_path, monkeypatch, num_cores, num_ranks, threads
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(num_cores)))
    env = environment_of(tmp_path, device="cuda", num_ranks=num_ranks, visible_devices=("0", "3"))
    assert (env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == (threads, "0,3")
    assert env["THP_MEM_ALLOC_ENABLE"] == "1"


def test_ranks_bound_to_cores_of_their_own_have_as_many_threads(tmp_path):
    bound = ((0, 1, 2), (4, 5, 6, 7))
    env = environment_of(tmp_path, device="cuda", num_ranks=2, rank_cores=bound)
    assert env["OMP_NUM_THREADS"] == "3"
