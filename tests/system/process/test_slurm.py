import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
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
    "srun": """#!/bin/bash
echo "srun $*" | head -1 >> {folder}/calls
while [ "$1" != bash ]; do shift; done
for rank in 0 1 2; do SLURM_NODEID=$rank "$@" & echo $! >> {folder}/tasks; done
wait
""",
    "scancel": """#!/bin/sh
echo "scancel $*" >> {folder}/calls
kill -${{1#--signal=}} $(cat {folder}/tasks)
""",
}


def write_tools(folder, *, slow_s=0, **more):
    tools = folder / "bin"
    tools.mkdir()
    for name, text in {**TOOLS, **more}.items():
        tool = tools / name
        tool.write_text(text.format(folder=folder, slow_s=slow_s))
        tool.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "libra", "SLURM_SUBMIT_DIR": str(folder)}
    return {"PATH": f"{tools}:/usr/bin:/bin", "TMPDIR": str(folder), **job}


@contextmanager
def script(env, *arguments):
    """The script with nobody's Slurm around it; whatever it started is ended with it."""
    process = subprocess.Popen(
        ["bash", str(SCRIPT), *arguments], env=env, start_new_session=True, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def lines_of(path):
    return path.read_text().splitlines() if path.exists() else []


NEVER_BEGINS = """#!/bin/sh
echo started >> {folder}/calls
exec sleep 60
"""


@pytest.mark.case("R-B67", "R-B56")
@pytest.mark.parametrize("comes_at", ["preflight", "start", "work"])
def test_a_notice_at_any_time_stops_once_and_requeues(tmp_path, comes_at):
    program = {"libra-supervisor": NEVER_BEGINS} if comes_at == "start" else {}
    env = write_tools(tmp_path, slow_s=int(comes_at == "preflight"), **program)
    calls = tmp_path / "calls"
    with script(env, "run.yaml") as started:
        waits_for = "show config" if comes_at == "preflight" else "started"
        wait_for(lambda: waits_for in lines_of(calls), what=waits_for)
        for _ in range(3):
            started.send_signal(signal.SIGUSR1)
        started.wait(20)
    said = lines_of(calls)
    assert said[0] == "show config"
    assert said[-1] == "requeue 7"
    assert said.count("requeue 7") == 1
    told = said.count("told")
    assert told == 1 if comes_at == "work" else told <= 1, "it may end before it can say so"


LEADS_AND_DISMISSES = """#!/bin/bash
[ -n "$LIBRA_NODE_TOKEN" ] || exit 9
echo "$LIBRA_NODE_TOKEN" >> {folder}/tokens
echo "started $SLURM_NODEID $*" >> {folder}/calls
trap 'echo "told $SLURM_NODEID" >> {folder}/calls; (sleep 0.7; touch {folder}/over) &' TERM
until [ -e {folder}/over ]; do sleep 0.05; done
"""
"""On the first node it ends when it is told to, after a while; the others when it has ended."""


@pytest.mark.case("R-B67", "R-B56")
@pytest.mark.parametrize("comes_at", ["preflight", "work"])
def test_a_notice_to_several_nodes_tells_the_leader_once_and_nobody_else(tmp_path, comes_at):
    env = write_tools(
        tmp_path,
        slow_s=int(comes_at == "preflight"),
        **{"libra-supervisor": LEADS_AND_DISMISSES},
    )
    calls = tmp_path / "calls"
    with script(env | {"SLURM_JOB_NUM_NODES": "3"}, "run.yaml", "-o", "a=b c") as started:
        num_lines = 1 if comes_at == "preflight" else 5
        wait_for(lambda: len(lines_of(calls)) >= num_lines, what="the start")
        for _ in range(3):
            started.send_signal(signal.SIGUSR1)
            # Signals that wait for each other are one.
            time.sleep(0.15)
        assert started.wait(30) == 0
    said = lines_of(calls)
    told = [line for line in said if line.startswith("told")]
    assert told == ["told 0"] if comes_at == "work" else told in ([], ["told 0"])
    assert said.count("requeue 7") == 1
    assert said[-1] == "requeue 7"
    assert not any(line.startswith("scancel") for line in said) or comes_at == "preflight"
    tokens = set(lines_of(tmp_path / "tokens"))
    run = f"run run.yaml -o a=b c --run-dir {tmp_path}/runs/libra-7 --resume"
    starts = {line for line in said if line.startswith("started")}
    assert starts <= {f"started {rank} {run}" for rank in range(3)}
    if comes_at == "work":
        assert len(starts) == 3
        assert len(tokens) == 1
        assert len(tokens.pop()) > 40
        assert any(
            "--kill-on-bad-exit=0 --no-kill" in line and "--ntasks-per-node=1" in line
            for line in said
        )
    assert not list(tmp_path.glob("tmp.*"))


DIES_ON_ITS_NODE = """#!/bin/bash
echo "started $SLURM_NODEID" >> {folder}/calls
case $SLURM_NODEID in
  0) until [ -e {folder}/over ]; do sleep 0.05; done; exit 4 ;;
  1) kill -KILL $$ ;;
  2) exit 5 ;;
esac
"""


@pytest.mark.case("R-B95")
def test_a_follower_is_started_again_three_times_when_it_was_killed_and_never_otherwise(tmp_path):
    sweep = "#!/bin/sh\necho swept $3 >> {folder}/calls\n"
    env = write_tools(tmp_path, **{"libra-supervisor": DIES_ON_ITS_NODE, "python3": sweep})
    calls = tmp_path / "calls"
    with script(env | {"SLURM_JOB_NUM_NODES": "3"}, "run.yaml") as started:
        wait_for(lambda: lines_of(calls).count("started 1") == 4, what="four starts")
        wait_for(lambda: sum("swept" in it for it in lines_of(calls)) == 4, what="four sweeps")
        (tmp_path / "over").touch()
        assert started.wait(30) == 4
    said = lines_of(calls)
    assert said.count("started 1") == 4
    assert said.count("started 2") == said.count("started 0") == 1
    assert f"swept {tmp_path}/runs/libra-7/run_id" in said
    assert "requeue 7" not in said


OUTLIVES_ITS_LEADER = """#!/bin/bash
echo "started $SLURM_NODEID" >> {folder}/calls
if [ "$SLURM_NODEID" = 0 ]; then
  until [ -e {folder}/over ]; do sleep 0.05; done
  kill -KILL $$
fi
trap 'echo "told $SLURM_NODEID" >> {folder}/calls; exit 0' TERM
while :; do sleep 0.05; done
"""


@pytest.mark.case("R-B51")
def test_followers_of_a_leader_that_was_killed_are_ended_with_the_job(tmp_path):
    env = write_tools(tmp_path, **{"libra-supervisor": OUTLIVES_ITS_LEADER})
    calls = tmp_path / "calls"
    env |= {"SLURM_JOB_NUM_NODES": "3", "LIBRA_LEAVE_S": "1"}
    with script(env, "run.yaml") as started:
        wait_for(lambda: sum("started" in it for it in lines_of(calls)) == 3, what="the start")
        (tmp_path / "over").touch()
        assert started.wait(60) == 137
    said = lines_of(calls)
    assert {"told 1", "told 2"} <= set(said)
    assert said.count("scancel --signal=TERM 7.0") == 1
    assert said.count("started 1") == 1


@pytest.mark.parametrize(
    ("arguments", "env", "code", "says"),
    [
        ([], {}, 2, "usage"),
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
