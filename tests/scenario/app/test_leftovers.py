"""What `doctor` says of processes of other runs on the machine."""

import json
import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)


def findings(run):
    done = run.call_bare("doctor", "--json")
    found = json.loads(done.stdout)
    return done.returncode, [it for it in found if it["check"].startswith("leftovers")]


def of_run(run_id, found):
    return next(it for it in found if it["check"] == f"leftovers of run {run_id}")


@pytest.mark.case("R-B96", "R-B76")
def test_leftovers_of_a_dead_run_are_named_with_what_to_do(fake_run):
    run = fake_run()
    run.start()
    run.until_step(1)
    run_id = run.status()["run_id"]
    _, found = findings(run)
    alive = of_run(run_id, found)
    assert alive["ok"]
    assert f"libra-supervisor pid {run.process.pid} on" in alive["detail"]
    run.kill()
    code, found = findings(run)
    dead = of_run(run_id, found)
    assert code == 5
    assert not dead["ok"]
    engines = run.pids("vllm")
    assert all(f"{child} (pid {pid}" in dead["detail"] for pid, child in engines.items())
    assert f"--run-dir {run.run_dir} --resume" in dead["advice"]
    # The command that it gives ends them.
    command = dead["advice"].rpartition(": ")[2].split()
    assert command[0] == "python3"
    subprocess.run([sys.executable, *command[1:]], env=run.env, check=True, timeout=30)
    run.until(lambda: not run.pids("vllm"))


def test_a_leftover_without_a_run_directory_is_named_with_its_pid(fake_run):
    run = fake_run()
    env = {**run.env, "LIBRA_RUN_ID": f"gone-{os.getpid()}", "LIBRA_CHILD_ID": "vllm-0"}
    # Orphaned, as below this process nothing counts as left over.
    script = "import subprocess,sys; print(subprocess.Popen(['sleep','60'],cwd='/',stdout=2).pid)"
    pid = int(subprocess.check_output([sys.executable, "-c", script], env=env, timeout=20))
    try:
        code, found = findings(run)
        finding = of_run(f"gone-{os.getpid()}", found)
        assert (code, finding["ok"]) == (5, False)
        assert finding["advice"].endswith(f"kill -9 {pid}")
    finally:
        os.kill(pid, signal.SIGKILL)
