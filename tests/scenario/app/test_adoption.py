"""A supervisor is killed, another one is started with the same run directory."""

import os
import re
import signal
import subprocess
import time

import msgspec
import pytest

from fake_runs import read_lines
from libra_supervisor.journal import StateFile
from libra_supervisor.process.identity import identity_of

pytestmark = pytest.mark.timeout(180)
ENGINES = ("vllm-0", "vllm-1")


def servers(run):
    """Pid by instance: fails when an instance has two processes."""
    found = {}
    for pid, child in run.pids("vllm").items():
        assert child not in found, f"{child} runs twice"
        found[child] = pid
    return found


def started(run, child):
    return [entry for entry in run.journal("ChildStarted") if entry["child_id"] == child]


def lines_of(run, child, incarnation):
    text = (run.run_dir / "logs" / f"{child}.log").read_text()
    return [int(n) for n in re.findall(rf"line (\d+) of {incarnation}", text)]


def record_of(run, child):
    return next(record for record in state_of(run).children if record.child_id == child)


def state_of(run):
    return StateFile(run.run_dir / "state.json").load()


def leave_unfinished(run):
    """What killed writers and removers of weights and checkpoints leave behind."""
    leftovers = [
        run.run_dir / "weights" / ".v000001.discarded",
        run.run_dir / "weights" / ".v000999.partial",
        run.run_dir / "checkpoints" / ".step_000001.discarded",
    ]
    for path in leftovers:
        path.mkdir(exist_ok=True)
        (path / "model.safetensors").write_bytes(b"half of it")
    return leftovers


def versions_are_asked_and_settled(run):
    """What an adopted server holds is what it says; then the restored version is loaded."""
    restored = next(entry for entry in run.journal("GangReady") if entry["step"])["step"]
    versions = [line["policy_version"] for line in read_lines(run.run_dir / "reloads.jsonl")]
    assert versions.count(restored) == 2
    answered = [e["state"]["policy_version"] for e in run.journal("InstanceAnswered")]
    assert answered[:2] == [0, 0]
    assert min(answered[2:]) > 0, "not the base version of a new process"


@pytest.mark.case("R-B74", "R-B27")
def test_live_servers_go_on_under_the_new_supervisor(fake_run):
    run = fake_run()
    run.start()
    run.until_step(5)
    before = servers(run)
    incarnations = {child: record_of(run, child).incarnation for child in ENGINES}
    run.kill()
    killed_at_step = max(run.steps())
    leftovers = leave_unfinished(run)
    num_lines = {child: len(lines_of(run, child, incarnations[child])) for child in ENGINES}
    time.sleep(0.5)
    run.start("--resume")
    run.until_step(killed_at_step + 3)
    assert servers(run) == before
    assert not any(path.exists() for path in leftovers)
    for child in ENGINES:
        (_, again) = started(run, child)
        assert (again["is_adopted"], again["pid"]) == (True, before[child])
        assert again["incarnation"] == incarnations[child]
        # The log has every line, those of the time without a supervisor too.
        lines = lines_of(run, child, incarnations[child])
        assert lines == [*range(1, len(lines) + 1)]
        assert len(lines) > num_lines[child] + 5
    versions_are_asked_and_settled(run)
    # The next one finds them too.
    run.kill()
    run.start("--resume")
    run.until_step(killed_at_step + 6)
    assert servers(run) == before
    assert run.call("stop").returncode == 0
    assert run.wait() == 0
    assert run.pids() == {}


@pytest.mark.case("R-B74", "R-B73")
def test_what_cannot_be_adopted_is_ended_and_a_stranger_is_not(fake_run):
    """vllm-0 died with its supervisor, its pid is another's now, and vllm-1 is adopted."""
    run = fake_run()
    run.start()
    run.until_step(2)
    before = servers(run)
    run.kill()
    os.kill(before["vllm-0"], signal.SIGKILL)
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        file = StateFile(run.run_dir / "state.json")
        state = file.load()
        forged = identity_of(stranger.pid)
        records = tuple(
            msgspec.structs.replace(it, pid=forged.pid, start_ticks=forged.start_ticks)
            if it.child_id == "vllm-0"
            else it
            for it in state.children
        )
        file.save(msgspec.structs.replace(state, children=records))
        run.start("--resume")
        run.until_step(max(run.steps()) + 2)
        after = servers(run)
        assert after["vllm-1"] == before["vllm-1"]
        assert after["vllm-0"] not in (before["vllm-0"], stranger.pid)
        assert stranger.poll() is None
        (refused,) = run.said("child_not_kept")
        assert (refused["child"], refused["pid"]) == ("vllm-0", stranger.pid)
        assert "does not carry its tag" in refused["why"]
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.case("R-B74")
def test_servers_of_another_configuration_are_replaced(fake_run):
    run = fake_run()
    run.start()
    run.until_step(2)
    before = servers(run)
    run.kill()
    run.start("--resume", "-o", "rollout_max_num_seqs=7")
    run.until_step(max(run.steps()) + 2)
    assert set(servers(run).values()).isdisjoint(before.values())
    refused = run.said("child_not_kept")
    assert {line["why"] for line in refused} == {"it was started with another configuration"}
    assert {line["child"] for line in refused} == set(ENGINES)


@pytest.mark.case("R-B74", "R-B58")
def test_servers_whose_output_goes_nowhere_are_replaced(fake_run):
    """The log relay died with the supervisor: a server that prints would meet a closed pipe."""
    run = fake_run()
    run.start()
    run.until_step(2)
    before = servers(run)
    (relay,) = run.pids("log-relay")
    run.process.kill()
    os.kill(relay, signal.SIGKILL)
    run.kill()
    run.start("--resume")
    run.until_step(max(run.steps()) + 2)
    assert set(servers(run).values()).isdisjoint(before.values())
    whys = {line["child"]: line["why"] for line in run.said("child_not_kept")}
    assert set(whys) == set(ENGINES)
    assert all("the log relay is gone too" in why for why in whys.values())


def test_a_server_that_was_loading_is_adopted_and_waited_for(fake_run):
    run = fake_run()
    run.env["FAKE_SERVER"] = '{"start_s": 4}'
    run.start()
    before = run.until(lambda: len(s := servers(run)) == 2 and s)
    run.until(lambda: {record.child_id for record in state_of(run).children} >= set(ENGINES))
    run.kill()
    run.start("--resume")
    run.until_step(2)
    assert servers(run) == before


@pytest.mark.case("R-B70")
def test_servers_on_configured_ports_are_adopted_there(fake_run, free_ports):
    base = free_ports(2)
    run = fake_run(rollout_port_base=base)
    run.start()
    run.until_step(2)
    before = servers(run)
    run.kill()
    run.start("--resume")
    run.until_step(max(run.steps()) + 2)
    assert servers(run) == before
    # A replaced one gets the same port, its closed connections notwithstanding.
    assert run.call("restart", "vllm-0").returncode == 0
    run.until(lambda: len(started(run, "vllm-0")) == 3)
    run.until_step(max(run.steps()) + 4)
    assert record_of(run, "vllm-0").facts["url"].endswith(f":{base}")
    assert servers(run)["vllm-1"] == before["vllm-1"]


@pytest.mark.case("R-B74", "R-B76")
def test_servers_of_a_run_whose_state_was_damaged_are_ended(fake_run):
    run = fake_run()
    run.start()
    run.until_step(2)
    before, run_id = servers(run), run.status()["run_id"]
    run.kill()
    (run.run_dir / "state.json").write_text('{"run_id": "')
    refused = run.call_bare("run", str(run.config), "--run-dir", str(run.run_dir), "--resume")
    assert (refused.returncode, "move it away" in refused.stderr) == (2, True)
    (run.run_dir / "state.json").unlink()
    run.start("--resume")
    run.until_step(max(run.steps()) + 2)
    assert run.status()["run_id"] == run_id
    assert set(servers(run).values()).isdisjoint(before.values())
