"""Whole runs on fake servers and ranks: a server sleeps while the core has its slot."""

import json
import os
import signal

import msgspec
import pytest

from libra.ids import SlotId
from wanted_plans import changes_in, plan_in, want

pytestmark = pytest.mark.timeout(180)
SLEEPS = {
    "runtime_dynamic_reconfiguration_enabled": True,
    "runtime_reconfigure_training": True,
    "runtime_cluster_swap_enabled": True,
    "runtime_lent_servers": "sleep",
    "runtime_reconfigure_timeout_s": 60.0,
}
LENDER = "vllm-1"


def changed(run, wanted):
    number = len(changes_in(run.run_dir)) + 1
    want(run.run_dir, wanted, decision_id=number)
    return run.until(lambda: changes_in(run.run_dir)[number - 1 :], within_s=60)[0]


def lent_plan(plan):
    """The second server's slot goes to the core."""
    core = msgspec.structs.replace(plan.train, dp=2, slots=(*plan.train.slots, SlotId(1)))
    return msgspec.structs.replace(plan, train=core, instances=plan.instances[:1])


@pytest.fixture
def lent(fake_run):
    """Starts a run and lends its second server's slot to the core; returns both and the plan."""

    def make(*arguments, **switches):
        run = fake_run(train_gpus=1, global_resource_planner=SLEEPS)
        run.env["FAKE_SERVER"] = json.dumps(switches)
        run.start(*arguments)
        run.until_step(2)
        plan = plan_in(run.run_dir)
        return run, changed(run, lent_plan(plan)), plan

    return make


def pid_of(run, child=LENDER):
    return next((pid for pid, name in run.pids("vllm").items() if name == child), None)


def row_of(run, child=LENDER):
    return next((it for it in run.status()["children"] if it["child"] == child), None)


def goes_on(run, *, since=1):
    """Every step from `since` on is trained once, no sample was lost, the run ends cleanly."""
    newest = max(run.steps()) + 3
    run.until_step(newest)
    steps = [step for step in run.steps() if since <= step <= newest]
    assert steps == list(range(since, newest + 1))
    assert not run.said("sample_failed")
    assert run.call("stop").returncode == 0
    assert run.wait() == 0
    assert run.pids() == {}


def test_a_server_sleeps_there_and_is_the_same_process_back(lent):
    run, there, plan = lent()
    assert (there.outcome, there.asleep) == ("done", (LENDER,)), there
    assert "put vllm-1 to sleep" in there.transitions
    pid = pid_of(run)
    row = row_of(run)
    assert (row["state"], row["pid"], row["policy_version"]) == ("asleep", pid, None)
    for verb in ("drain", "undrain", "restart"):
        refused = run.call(verb, LENDER)
        assert refused.returncode == 1
        assert "vllm-1 sleeps while training has its devices" in refused.stderr
    run.until_step(max(run.steps()) + 3)
    back = changed(run, plan)
    assert (back.outcome, back.started, back.asleep) == ("done", (LENDER,), ()), back
    assert set(back.stages[LENDER]) == {"wake", "load"}
    assert pid_of(run) == pid
    assert row_of(run)["state"] in ("serving", "reloading")
    goes_on(run)


def test_what_sleeps_ends_with_the_run(lent):
    run, there, _ = lent()
    assert there.asleep == (LENDER,)
    assert pid_of(run) is not None
    goes_on(run)


def test_a_server_that_does_not_fall_asleep_in_time_is_stopped(lent):
    run, there, plan = lent("-o", "supervision.liveness_stall_s=3", hangs={LENDER: ["/sleep"]})
    assert (there.outcome, there.asleep) == ("done", ()), there
    assert [it["instance"] for it in run.said("instance_does_not_sleep")] == [LENDER]
    assert pid_of(run) is None
    back = changed(run, plan)
    assert (back.outcome, back.started) == ("done", ("vllm-2",)), back
    goes_on(run)


def test_a_server_that_does_not_wake_up_is_replaced(lent):
    run, there, plan = lent(fails={LENDER: ["/wake_up"]})
    assert there.asleep == (LENDER,)
    pid = pid_of(run)
    back = changed(run, plan)
    assert (back.outcome, back.started) == ("done", (LENDER,)), back
    (said,) = run.said("instance_replaced")
    assert "it does not wake up" in said["why"]
    assert pid_of(run) not in (None, pid)
    goes_on(run)


def test_a_sleeper_that_is_killed_is_not_restarted(lent):
    run, there, plan = lent()
    assert there.asleep == (LENDER,)
    os.kill(pid_of(run), signal.SIGKILL)
    run.until(lambda: row_of(run) is None)
    run.until_step(max(run.steps()) + 3)
    assert pid_of(run) is None
    assert [it["instance"] for it in run.said("sleeper_ended")] == [LENDER]
    back = changed(run, plan)
    assert (back.outcome, back.started) == ("done", ("vllm-2",)), back
    goes_on(run)


def test_a_sleeper_that_says_nothing_any_more_is_ended(lent):
    run, there, plan = lent("-o", "supervision.liveness_stall_s=2")
    assert there.asleep == (LENDER,)
    os.kill(pid_of(run), signal.SIGSTOP)
    run.until(lambda: row_of(run) is None)
    assert pid_of(run) is None
    assert changed(run, plan).outcome == "done"
    goes_on(run)


def test_the_next_supervisor_replaces_what_was_to_wake_up_and_still_sleeps(lent):
    run, there, plan = lent(hangs={LENDER: ["/wake_up"]})
    assert there.asleep == (LENDER,)
    pid = pid_of(run)
    want(run.run_dir, plan, decision_id=2)
    run.until(lambda: row_of(run)["state"] == "waking")
    run.kill()
    run.start("--resume")
    back = run.until(lambda: changes_in(run.run_dir)[1:], within_s=60)[0]
    assert (back.outcome, back.decision_id, back.started) == ("done", 2, (LENDER,)), back
    assert pid_of(run) not in (None, pid)
    assert run.call("stop").returncode == 0
    assert run.wait() == 0


def test_the_next_supervisor_ends_what_sleeps_and_goes_on_without_it(lent):
    run, there, plan = lent()
    assert there.asleep == (LENDER,)
    serving = pid_of(run, "vllm-0")
    run.until_step(max(run.steps()) + 2)
    run.kill()
    run.start("--resume")
    resumed_at = max(run.steps()) + 1
    run.until_step(resumed_at + 1)
    assert pid_of(run) is None
    assert pid_of(run, "vllm-0") == serving
    back = changed(run, plan)
    assert (back.outcome, len(back.started)) == ("done", 1), back
    assert back.started != (LENDER,), "a name was used twice"
    goes_on(run, since=resumed_at)
