import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from libra_supervisor.journal import StateFile
from libra_supervisor.process.kernel import read_table, read_tag
from processes import CHILDREN
from slurm import slurm, wait_for

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "scripts" / "slurm" / "libra.sbatch"

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

WRAPPER = """#!/bin/sh
# run CONFIG --run-dir DIR --resume
echo "$@" >> "{folder}/starts"
exec {python} {children}/fake_supervisor.py "$4" 0
"""


@pytest.fixture
def cluster(tmp_path):
    with slurm(tmp_path) as it:
        tools = tmp_path / "bin"
        tools.mkdir()
        wrapper = tools / "libra-supervisor"
        wrapper.write_text(
            WRAPPER.format(folder=tmp_path, python=sys.executable, children=CHILDREN)
        )
        wrapper.chmod(0o755)
        # A link would lose the virtual environment.
        python = tools / "python3"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        it.env["PATH"] = f"{tools}:{os.environ['PATH']}"
        it.env["PYTHONPATH"] = f"{REPOSITORY}:{REPOSITORY}/supervisor"
        yield it


def submit(cluster, *options):
    words = cluster.call("sbatch", "--parsable", *options, str(SCRIPT), "run.yaml")
    return int(words.split(";")[0])


def run_dir_of(cluster, job_id):
    return cluster.folder / "runs" / f"libra-{job_id}"


def state_of(cluster, job_id):
    return StateFile(run_dir_of(cluster, job_id) / "state.json").load()


def servers(run_id):
    """Pids of the run's servers and what they started, the log relay aside."""
    found = {pid: read_tag(pid) for pid, row in read_table().items() if not row.is_dead}
    return sorted(
        pid
        for pid, tag in found.items()
        if tag is not None and tag[0] == run_id and "vllm" in tag[1]
    )


def running(cluster, job_id):
    def both_up():
        state = state_of(cluster, job_id)
        return state if state is not None and len(servers(state.run_id)) == 4 else None

    return wait_for(both_up, what="two servers with a hidden descendant each")


def log_of(cluster, job_id):
    return (cluster.folder / f"libra-{job_id}.log").read_text()


@pytest.mark.case("R-B67", "R-B97", "R-B51")
def test_a_notice_saves_and_requeues_once_and_scancel_leaves_nothing(cluster):
    job_id = submit(cluster)
    state = running(cluster, job_id)
    first = servers(state.run_id)
    log = log_of(cluster, job_id)
    assert "KillWait=5 sec ProctrackType=proctrack/linuxproc" in log
    assert "misses processes that change their parent" in log
    for _ in range(2):
        cluster.call("scancel", "--batch", "--signal=USR1", str(job_id))
    wait_for(lambda: cluster.job(job_id)["Restarts"] == "1", what="the requeue")
    assert not set(servers(state.run_id)) & set(first)
    log = log_of(cluster, job_id)
    assert log.count("notice received") == 1
    assert log.count("requeueing job") == 1
    wait_for(lambda: cluster.job(job_id)["JobState"] == "RUNNING", what="the second start")
    state = running(cluster, job_id)
    starts = (cluster.folder / "starts").read_text().splitlines()
    assert starts == [f"run run.yaml --run-dir {run_dir_of(cluster, job_id)} --resume"] * 2
    cluster.call("scancel", str(job_id))
    wait_for(lambda: not servers(state.run_id), what="the end of every process")
    wait_for(lambda: cluster.job(job_id)["JobState"] == "CANCELLED", what="the cancellation")


@pytest.mark.case("R-B51", "R-B95")
def test_servers_of_a_killed_supervisor_do_not_outlive_the_job(cluster):
    job_id = submit(cluster)
    state = running(cluster, job_id)
    os.kill(state.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not servers(state.run_id), what="the sweep")
    wait_for(lambda: cluster.job(job_id)["JobState"] == "FAILED", what="the failure of the job")
    assert cluster.job(job_id)["Restarts"] == "0"


TOOLS = {
    "scontrol": """#!/bin/sh
echo "$@" >> {folder}/calls
[ "$1" = requeue ] || sleep {slow_s}
""",
    "libra-supervisor": """#!/bin/bash
trap 'echo told >> {folder}/calls; exit 0' TERM
echo started >> {folder}/calls
while :; do sleep 0.05; done
""",
    "python3": "#!/bin/sh\nexit 0\n",
}


@pytest.mark.case("R-B67", "R-B56")
@pytest.mark.parametrize("comes_at", ["preflight", "start", "work"])
def test_a_notice_at_any_time_stops_once_and_requeues(tmp_path, comes_at):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in TOOLS.items():
        tool = tools / name
        tool.write_text(text.format(folder=tmp_path, slow_s=1 if comes_at == "preflight" else 0))
        tool.chmod(0o755)
    if comes_at == "start":
        (tools / "libra-supervisor").write_text(
            f"#!/bin/sh\necho started >> {tmp_path}/calls\nexec sleep 60\n"
        )
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "libra", "SLURM_SUBMIT_DIR": str(tmp_path)}
    env = {"PATH": f"{tools}:/usr/bin:/bin", **job}
    calls = tmp_path / "calls"
    script = subprocess.Popen(["bash", str(SCRIPT), "run.yaml"], env=env)
    try:
        waits_for = "show config" if comes_at == "preflight" else "started"
        wait_for(lambda: calls.exists() and waits_for in calls.read_text(), what=waits_for)
        for _ in range(3):
            script.send_signal(signal.SIGUSR1)
        script.wait(20)
    finally:
        script.kill()
    said = calls.read_text().splitlines()
    assert said[0] == "show config"
    assert said[-1] == "requeue 7"
    assert said.count("requeue 7") == 1
    told = said.count("told")
    assert told == 1 if comes_at == "work" else told <= 1, "it may end before it can say so"


@pytest.mark.parametrize(
    ("arguments", "env", "code", "says"),
    [
        ([], {}, 2, "usage"),
        (
            ["run.yaml"],
            {"SLURM_JOB_NUM_NODES": "2"},
            2,
            "this script is for one node, and 2 were given",
        ),
        (["run.yaml"], {"LIBRA_SUPERVISOR": "no-such-program"}, 5, "activate its environment"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(arguments, env, code, says):
    env = {"PATH": "/usr/bin:/bin", **env}
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=env, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == code
    assert says in done.stderr
