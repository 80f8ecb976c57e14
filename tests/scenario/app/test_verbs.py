"""Every verb of the command line that talks to a run, on a run with fake servers and ranks."""

import json
import signal
import subprocess
import time

import pytest

from fake_runs import FakeRun, read_lines

pytestmark = pytest.mark.timeout(400)


def child(run, name):
    return next(it for it in run.status()["children"] if it["child"] == name)


def said_no(done, text):
    return done.returncode == 1 and text in done.stderr and done.stdout == ""


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """One run for all tests that leave it as they found it."""
    run = FakeRun(tmp_path_factory.mktemp("run"), total_steps=1_000_000)
    run.env["FAKE_STEP_S"] = "0.3"
    try:
        run.start()
        run.until_step(2)
        yield run
    finally:
        run.end()


def test_status_tells_of_the_run_and_of_every_child(running):
    run = running
    for name in ("vllm-0", "vllm-1"):
        run.until(lambda name=name: child(run, name)["kv_use_fraction"] is not None)
    status = run.status()
    assert status["pid"] == run.process.pid
    assert status["step"] >= 2
    assert status["waiting_for"]
    pids = run.pids()
    by_name = {it["child"]: it for it in status["children"]}
    assert set(by_name) == {"trainer", "vllm-0", "vllm-1"}
    for name, it in by_name.items():
        assert pids[it["pid"]] == name
        assert it["since_s"] >= 0
        ends = [e for e in run.journal("ChildExited") if e["child_id"] == name]
        assert (it["num_restarts"], it["last_error"]) == (len(ends), "")
    for name in ("vllm-0", "vllm-1"):
        assert by_name[name]["num_queued"] == 0
        assert by_name[name]["policy_version"] >= 1
    text = run.call("status").stdout
    assert text.startswith(f"run {status['run_id']} (pid {run.process.pid})")
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["trainer", "vllm-0", "vllm-1"]
    watching = subprocess.Popen(
        run.argv("status", "--watch", "--json", "--run-dir", str(run.run_dir)),
        env=run.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    seen = [json.loads(watching.stdout.readline())["uptime_s"] for _ in range(2)]
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=120)
    assert watching.returncode == 130
    assert seen[1] > seen[0]


@pytest.mark.case("R-B19")
def test_status_tells_of_each_engine_of_a_data_parallel_server(fake_run):
    run = fake_run(total_steps=1_000_000)
    run.env["FAKE_SERVER"] = '{"second_waits": 3}'
    run.env["FAKE_STEP_S"] = "0.3"
    run.start()
    run.until_step(1)
    run.until(lambda: child(run, "vllm-0")["num_queued"] == 3)
    first, second = child(run, "vllm-0")["engines"]
    assert (first["engine"], first["num_queued"], first["num_running"] is None) == ("0", 0, False)
    assert second == {
        "engine": "1",
        "num_running": None,
        "num_queued": 3,
        "kv_use_fraction": None,
    }
    assert "  engine 1  ?" in run.call("status").stdout


@pytest.mark.case("R-B29")
def test_a_drained_engine_gets_nothing_until_it_is_undrained(running):
    run = running
    assert run.call("drain", "vllm-0").returncode == 0
    run.until(lambda: child(run, "vllm-0")["state"] == "draining")
    run.until(lambda: child(run, "vllm-0")["num_in_flight"] == 0)
    step = max(run.steps())
    run.until_step(step + 3)
    drained = child(run, "vllm-0")
    # Now and then it is seen in the middle of a reload.
    assert drained["state"] in ("draining", "reloading")
    assert drained["num_in_flight"] == 0
    assert drained["policy_version"] >= step, "it takes part in reloads"
    assert run.call("undrain", "vllm-0").returncode == 0
    run.until(lambda: child(run, "vllm-0")["state"] == "serving")
    run.until(lambda: child(run, "vllm-0")["num_in_flight"] > 0)


@pytest.mark.case("R-B100")
def test_a_restarted_engine_is_drained_replaced_once_and_serves_again(running):
    run = running
    before = {name: child(run, name)["pid"] for name in ("vllm-0", "vllm-1")}
    num_restarts = child(run, "vllm-0")["num_restarts"]
    done = run.call("restart", "vllm-0")
    assert (done.returncode, done.stdout) == (0, "restart of vllm-0 begun\n")
    run.until(lambda: child(run, "vllm-0")["pid"] not in (before["vllm-0"], None))
    run.until(lambda: child(run, "vllm-0")["state"] == "serving")
    run.until_step(max(run.steps()) + 2)
    again = child(run, "vllm-0")
    assert (again["num_restarts"], again["last_error"]) == (num_restarts + 1, "")
    assert child(run, "vllm-1")["pid"] == before["vllm-1"]
    starts = [e for e in run.journal("ChildStarted") if e["child_id"] == "vllm-0"]
    assert len(starts) == num_restarts + 2, "one new process, not two"
    end = [e for e in run.journal("ChildExited") if e["child_id"] == "vllm-0"][-1]
    assert (end["asked_for"], end["exit_code"]) == (True, 0)
    assert run.journal("ChildRestartScheduled") == [], "it costs nothing of the budget"


def test_reload_loads_the_served_weights_once_more_into_every_engine(running):
    run = running

    def repeated():
        lines = read_lines(run.run_dir / "reloads.jsonl")
        return [line for line in lines if line["is_catch_up"] and len(line["acks"]) == 2]

    assert repeated() == []
    # A reload that is on its way anyway is not repeated, which is said.
    while not repeated():
        answer = run.call("reload")
        if answer.returncode:
            assert said_no(answer, "nothing is reloaded: ")
            assert "is on its way" in answer.stderr
        time.sleep(0.1)
    assert repeated()[0]["outcome"] == "committed"


def test_what_cannot_be_done_is_said_and_ends_with_1(running):
    run = running
    for verb in ("drain", "undrain", "restart"):
        assert said_no(run.call(verb, "vllm-9"), "no engine 'vllm-9'; there are vllm-0, vllm-1")
    assert said_no(run.call("restart", "trainer"), "no engine 'trainer'")
    answer = run.call("drain", "--node", "1")
    assert said_no(answer, "the run has no node 1; it has one, node 0")


def test_a_run_on_one_machine_has_node_0(running):
    run = running
    for verb in ("drain", "undrain"):
        answer = run.call(verb, "--node", "0")
        assert answer.stdout == f"{verb} of vllm-0, vllm-1 on node 0 begun\n"
    run.until(lambda: child(run, "vllm-1")["state"] in ("serving", "reloading"))


def test_logs_are_chosen_by_child_role_and_rank_and_followed(running):
    run = running

    def lines(*options):
        return run.call("logs", *options).stdout.splitlines()

    assert {line.split()[1] for line in lines("--role", "rollout")} == {"vllm-0", "vllm-1"}
    earlier = lines("--child", "vllm-1")
    assert {line.split()[1] for line in earlier} == {"vllm-1"}
    assert set(lines("--child", "vllm-1", "--since", "0s")).isdisjoint(earlier)
    of_rank = lines("--role", "trainer", "--rank", "1")
    assert any("trained step" in line for line in of_rank)
    assert all(" trainer rank 1 out | [rank 1] " in line for line in of_rank)
    both = [line for line in lines("--role", "trainer") if "trained step 1" in line]
    assert {line.split("|")[1].split("]")[0] for line in both} == {" [rank 0", " [rank 1"}
    following = subprocess.Popen(
        run.argv("logs", "-f", "--child", "vllm-0", "--since", "0s", "--run-dir", str(run.run_dir)),
        env=run.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert " vllm-0 out | line " in following.stdout.readline()
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=120)
    assert following.returncode == 130


def test_stop_saves_the_step_and_stop_now_does_not(fake_run):
    run = fake_run()
    run.env["FAKE_STEP_S"] = "0.3"
    run.start()
    run.until_step(1)
    assert run.call("stop").returncode == 0
    assert run.wait() == 0
    last = max(run.steps())
    assert (run.run_dir / "checkpoints" / f"step_{last:06d}").is_dir()
    assert run.pids() == {}
    nobody = run.call("status")
    assert nobody.returncode == 5
    assert "no control plane is running" in nobody.stderr
    run.start("--resume")
    run.until_step(last + 1)
    assert run.call("stop", "--now").returncode == 0
    assert run.wait() == 130
    assert run.pids() == {}


def test_the_metrics_page_of_a_run_has_its_event_loop(running):
    command = ["curl", "-sf", "--unix-socket", str(running.run_dir / "control.sock")]
    page = subprocess.check_output([*command, "http://libra/metrics"], text=True, timeout=120)
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(values["libra_event_loop_stall_seconds_count"]) > 10
    bucket = 'libra_event_loop_stall_seconds_bucket{le="+Inf"}'
    assert values[bucket] == values["libra_event_loop_stall_seconds_count"]
    assert float(values["libra_event_loop_longest_stall_seconds"]) > 0
