"""Looks at the plan of whole runs on fake servers and ranks: asked for, and by themselves."""

import json

import pytest

from fake_runs import read_lines

pytestmark = pytest.mark.timeout(180)
SLOW_DEVICE = {
    "device_name": "slow",
    "memory_bytes": 4_000_000_000,
    "dense_bf16_flops": 1.0e9,
    "memory_bandwidth_bytes_per_s": 1.0e6,
    "intra_node_bandwidth_bytes_per_s": 5.0e9,
    "inter_node_bandwidth_bytes_per_s": 1.0e9,
    "gpus_per_node": 4,
}
"""By this one's figures two ranks of TP 2 are faster than two of DP 2."""

ELASTIC = {
    "runtime_dynamic_reconfiguration_enabled": True,
    "runtime_reconfigure_training": True,
    "runtime_cluster_swap_enabled": True,
    "memory_budget_safety_margin_bytes": 0,
    "runtime_switch_cost_prior_s": 0.001,
    "elastic_hybrid_min_rollout_gpus": 2,
}


def begun(fake_run, **planner):
    run = fake_run(hardware=SLOW_DEVICE, global_resource_planner={**ELASTIC, **planner})
    run.start()
    run.until_step(2)
    return run


def lines(run, kind):
    path = run.run_dir / "reconfigurations.jsonl"
    return [line for line in read_lines(path) if line["kind"] == kind] if path.exists() else []


def decisions(run):
    return lines(run, "decision")


def test_an_operator_sees_what_would_be_done_and_has_it_done(fake_run):
    run = begun(fake_run)
    plan = run.status()["plan"]
    shown = run.call("replan", "--dry-run")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("switch found worth it (decision 1, after step ")
    assert f"in force:  {plan}" in shown.stdout
    assert "because:   asked for; prior: mean 3 response tokens" in shown.stdout
    assert "  price_s 0.004\n" in shown.stdout
    (dry,) = decisions(run)
    assert f"candidate: {dry['candidate']}\n" in shown.stdout
    assert (dry["verdict"], dry["switch_kind"], dry["is_dry_run"]) == ("switch", "reshape", True)
    run.until_step(max(run.steps()) + 2)
    status = run.status()
    assert status["plan"] == plan
    assert status["last_decision"].startswith("switch found worth it after step ")
    assert f"newest look at it: {status['last_decision']}" in run.call("status").stdout
    done = run.call("replan")
    assert done.returncode == 0
    assert done.stdout.startswith("switch decided (decision 2, after step ")
    (change,) = run.until(lambda: lines(run, "reconfiguration"))
    assert (change["decision_id"], change["outcome"]) == (2, "done"), change["reason"]
    assert run.status()["plan"] == decisions(run)[1]["candidate"]
    step = max(run.steps())
    run.until_step(step + 2)
    steps = run.steps()
    assert steps == list(range(1, len(steps) + 1))
    kept = run.call("replan", "--dry-run")
    assert kept.stdout.startswith("plan kept (decision 3, after step ")
    assert run.call("stop").returncode == 0
    assert run.wait() == 0


def test_ids_of_decisions_go_on_after_a_resume(fake_run):
    run = begun(fake_run)
    assert run.call("replan", "--dry-run").returncode == 0
    assert run.call("stop").returncode == 0
    run.wait()
    run.start("--resume")
    run.until(lambda: run.status().get("phase") == "training")
    assert "(decision 2, " in run.call("replan", "--dry-run").stdout


def test_a_run_whose_plan_may_not_change_shows_it_and_does_nothing(fake_run):
    run = fake_run(
        hardware=SLOW_DEVICE, global_resource_planner={"memory_budget_safety_margin_bytes": 0}
    )
    run.start()
    run.until_step(2)
    refused = run.call("replan")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "runtime_dynamic_reconfiguration_enabled is false" in refused.stderr
    assert decisions(run) == []
    assert run.call("replan", "--dry-run").returncode == 0
    assert [it["is_dry_run"] for it in decisions(run)] == [True]
    run.until_step(max(run.steps()) + 12)
    assert len(decisions(run)) == 1


def test_without_a_description_of_the_hardware_it_says_what_is_missing(fake_run):
    run = fake_run()
    run.start()
    run.until_step(1)
    shown = run.call("replan", "--dry-run")
    assert shown.returncode == 0
    assert "hardware or model_arch are not described" in shown.stdout


def test_an_online_run_looks_at_its_plan_by_itself_and_says_what_it_saw(fake_run):
    run = begun(
        fake_run,
        runtime_online_replanning=True,
        runtime_replan_interval_steps=3,
        runtime_training_pool_plan_only=True,
    )
    run.until(lambda: len(decisions(run)) >= 3)
    for found in decisions(run):
        assert found["verdict"] == "keep"
        assert found["reason"]
        # A level that is young is not taken to last for long.
        most = min(50, 10 * found["numbers"]["num_steps_observed"])
        assert 0 < found["numbers"]["horizon_steps"] <= most
        assert not found["is_dry_run"]
    newest = decisions(run)[-1]
    assert newest["numbers"]["num_trajectories_observed"] > 0
    assert newest["numbers"]["measured_step_s"] < 60
    assert [it["decision_id"] for it in decisions(run)] == list(range(1, len(decisions(run)) + 1))
    assert not lines(run, "reconfiguration")
    logged = run.until(lambda: run.said("plan_looked_at")[2:] and run.said("plan_looked_at"))
    assert [it["decision_id"] for it in logged][:3] == [1, 2, 3]


def test_the_answer_to_programs_has_every_number_and_the_plan(fake_run):
    run = begun(fake_run)
    assert run.call("replan", "--dry-run").returncode == 0
    (line,) = decisions(run)
    assert json.dumps(line["numbers"])
    assert line["numbers"]["earned_s"] > line["numbers"]["price_s"]


def test_an_operator_names_a_plan_and_gets_it(fake_run):
    run = fake_run(global_resource_planner={"runtime_dynamic_reconfiguration_enabled": True})
    run.start()
    run.until_step(2)
    shown = run.call("replan", "--instances", "1x1", "--dry-run")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("order looked at (decision 1, after step ")
    assert "ordered:   train 2 GPUs (TP 1, PP 1, CP 1, DP 2), rollout 1 GPUs (1 x TP 1)\n" in (
        shown.stdout
    )
    assert shown.stdout.endswith("\n1. drain vllm-1\n2. stop vllm-1\n")
    assert lines(run, "reconfiguration") == []

    fewer = run.call("replan", "--instances", "1x1")
    assert fewer.returncode == 0
    (less,) = run.until(lambda: lines(run, "reconfiguration"))
    assert (less["decision_id"], less["outcome"], less["stopped"]) == (2, "done", ["vllm-1"])
    assert less["reason"] == "ordered by the operator"
    assert run.status()["plan"] == decisions(run)[1]["candidate"]
    assert run.call("replan", "--instances", "1x1,1x1").returncode == 0
    more = run.until(lambda: lines(run, "reconfiguration")[1:])[0]
    assert (more["outcome"], more["started"]) == ("done", ["vllm-2"])
    assert [it["verdict"] for it in decisions(run)] == ["ordered"] * 3

    refused = run.call("replan", "--train-gpus", "1")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "runtime_reconfigure_training is false" in refused.stderr
    last = run.until(lambda: lines(run, "reconfiguration")[2:])[0]
    assert last["outcome"] == "refused"
    impossible = run.call("replan", "--hybrids", "99")
    assert impossible.returncode == 1
    assert impossible.stderr.startswith("this needs 103 GPUs, and the run has ")
    assert len(decisions(run)) == 4
