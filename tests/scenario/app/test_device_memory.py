"""On CUDA a start waits for its device; the driver is a fake one, everything else as in a run."""

import json
import os

import pytest

from fake_runs import SUPPORT

pytestmark = pytest.mark.timeout(180)
GIB = 2**30


@pytest.mark.case("R-B50")
def test_a_server_waits_for_the_memory_of_a_dead_one_and_spends_nothing_of_its_budget(fake_run):
    run = fake_run()
    used = run.run_dir.parent / "used.json"
    used.write_text("{}")
    run.env["PYTHONPATH"] += os.pathsep + str(SUPPORT / "fake_driver")
    run.env |= {"FAKE_NVML": str(used), "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    run.start("-o", "device=cuda", "-o", "supervision.restart_max_in_window=1")
    run.until_step(1)
    # The server's workers are gone, its memory is not.
    used.write_text(json.dumps({"1": 80 * GIB}))
    (pid,) = run.pids("vllm-1")
    os.kill(pid, 9)

    def waiting():
        child = next(it for it in run.status().get("children", []) if it["child"] == "vllm-1")
        return child if child["state"] == "waiting" else None

    child = run.until(waiting)
    assert "waiting for GPU 1: 80.0 of 100.0 GiB are in use (pid 4711)" in child["last_error"]
    assert child["pid"] is None
    step = max(run.steps())
    run.until_step(step + 2)
    assert run.status()["children"][0]["state"] == "ready", "the trainer is not concerned"
    used.write_text("{}")
    run.until(lambda: len(run.journal("ChildReady")) >= 4 and run.pids("vllm-1"))
    assert len([it for it in run.journal("ChildWaiting") if it["child_id"] == "vllm-1"]) == 1
    assert run.journal("ChildGaveUp") == []
    # The gang, too, waits before its second start.
    used.write_text(json.dumps({"3": 50 * GIB}))
    os.kill(min(run.pids("trainer")), 9)
    run.until(lambda: [it for it in run.journal("ChildWaiting") if it["child_id"] == "trainer"])
    assert run.status()["children"][0]["state"] == "waiting"
    used.write_text("{}")
    step = max(run.steps())
    run.until_step(step + 2)
