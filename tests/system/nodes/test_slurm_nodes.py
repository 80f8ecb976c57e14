"""`scripts/slurm/libra.sbatch` over the nodes of a real Slurm, on fake servers and ranks."""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from fake_runs import write_config
from libra_supervisor.journal import read_run_id
from libra_supervisor.process.kernel import read_table, read_tag
from netns_hosts import hosts
from processes import CHILDREN
from slurm import slurm, wait_for

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "scripts" / "slurm" / "libra.sbatch"
GPUS = ("-o", "rollout_gpus=4", "-o", "train_gpus=4")

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


class Job:
    """One submission of the script."""

    def __init__(self, cluster, *options, num_nodes=3, overrides=()):
        self.cluster, self.num_nodes = cluster, num_nodes
        words = ("sbatch", "--parsable", f"--nodes={num_nodes}", *options, str(SCRIPT))
        config = (str(cluster.folder / "run.yaml"), *GPUS, *overrides)
        layout = ("-o", "heterogeneous_rollout.instances=[{tp: 1, count: 4}]")
        self.id = int(cluster.call(*words, *config, *layout).split(";")[0])
        self.run_dir = cluster.folder / "runs" / f"libra-{self.id}"

    def field(self, name):
        return self.cluster.job(self.id)[name]

    def until_it_is(self, state, *, within_s=90):
        wait_for(lambda: self.field("JobState") == state, within_s=within_s, what=self.log())

    def log(self):
        path = self.cluster.folder / f"libra-{self.id}.log"
        return path.read_text() if path.exists() else ""

    def steps(self):
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    def until_step(self, step, *, within_s=90):
        def is_there():
            # A job that was requeued is completing for a moment.
            assert self.field("JobState") in ("PENDING", "RUNNING", "COMPLETING"), self.log()
            return max(self.steps(), default=0) >= step

        wait_for(is_there, within_s=within_s, what=f"step {step}")

    def processes(self):
        """Of the run on all nodes, as the machine that they share sees them; the logs' aside."""
        run_id = read_run_id(self.run_dir / "run_id")
        found = {pid: read_tag(pid) for pid, row in read_table().items() if not row.is_dead}
        return [pid for pid, tag in found.items() if tag is not None and tag[0] == run_id]

    def supervisors(self):
        """By node rank."""
        found = {}
        for it in psutil.process_iter():
            try:
                line, environ = it.cmdline(), it.environ()
            except psutil.Error:
                continue
            if "--run-dir" in line and str(self.run_dir) in line and "fake_run.py" in line[1]:
                found[int(environ["SLURM_NODEID"])] = it
        return found


@contextmanager
def cluster_of(folder, count, **options):
    with hosts(count) as made, slurm(folder, made) as cluster:
        tools = folder / "bin"
        tools.mkdir()
        write_tool(tools / "libra-supervisor", f"{sys.executable} {CHILDREN / 'fake_run.py'}")
        write_tool(tools / "python3", sys.executable)
        paths = [str(Path(p).resolve()) for p in sys.path if p]
        cluster.env["PATH"] = f"{tools}:{os.environ['PATH']}"
        cluster.env["LIBRA_LEAVE_S"] = "6"
        cluster.env["PYTHONPATH"] = os.pathsep.join(paths)
        write_config(folder, node_lease_s=4, node_orphan_grace_s=20, **options)
        yield cluster


def write_tool(path, command):
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)


def test_a_job_over_three_nodes_runs_to_its_end_and_leaves_nothing(tmp_path):
    with cluster_of(tmp_path, 3, total_steps=2) as cluster:
        job = Job(cluster)
        job.until_it_is("COMPLETED")
        assert job.steps() == [1, 2]
        assert not job.processes()
        log = job.log()
    assert "3 nodes:" in log
    plan = json.loads((job.run_dir / "plan.json").read_text())
    assert [it["node"] for it in plan["instances"]] == [0, 0, 0, 1]
    assert plan["train"]["nodes"] == [1, 1, 2, 2]
    # srun says nothing of tasks that failed, and nothing was ended by force.
    assert "others have not" not in log
    assert "srun: error" not in log


@pytest.mark.long
@pytest.mark.case("R-B67", "R-B97", "R-B51")
def test_a_notice_saves_on_all_nodes_and_requeues_once_and_scancel_leaves_nothing(tmp_path):
    with cluster_of(tmp_path, 3, total_steps=100_000) as cluster:
        job = Job(cluster)
        job.until_step(2)
        for _ in range(2):
            cluster.call("scancel", "--batch", "--signal=USR1", str(job.id))
        wait_for(lambda: job.field("Restarts") == "1", what="the requeue")
        assert not job.processes()
        saved = max(job.steps())
        assert (job.run_dir / "checkpoints" / f"step_{saved:06d}").exists(), job.log()
        log = job.log()
        assert log.count("notice received") == 1
        assert log.count("requeueing job") == 1
        assert log.count("run_ended exit_code=0") == 1
        assert log.count("node_ended exit_code=0") == 2
        job.until_step(saved + 2)
        assert sorted(job.steps()) == list(range(1, 1 + max(job.steps())))
        assert "leads term=2" in job.log()
        cluster.call("scancel", str(job.id))
        wait_for(lambda: not job.processes(), what="the end of every process")
        wait_for(lambda: not job.supervisors(), what="the end of every supervisor")
        job.until_it_is("CANCELLED")
        assert job.field("Restarts") == "1"


@pytest.mark.long
@pytest.mark.case("R-B51", "R-B95")
def test_a_follower_that_is_killed_is_started_again_and_the_run_goes_on(tmp_path):
    with cluster_of(tmp_path, 3, total_steps=100_000) as cluster:
        job = Job(cluster)
        job.until_step(2)
        killed = job.supervisors()[1]
        killed.kill()
        wait_for(lambda: 1 in job.supervisors() and job.supervisors()[1] != killed, what="another")
        assert "the supervisor of node 1 was killed (exit code 137)" in job.log()
        before = max(job.steps())
        job.until_step(before + 2)
        assert job.log().count("leads term=") == 1
        cluster.call("scancel", "--batch", "--signal=USR1", str(job.id))
        wait_for(lambda: job.field("Restarts") == "1", what="the requeue")
        cluster.call("scancel", str(job.id))


@pytest.mark.long
@pytest.mark.case("R-B51", "R-B95")
def test_the_end_of_a_leader_that_is_killed_ends_the_job_on_all_nodes(tmp_path):
    with cluster_of(tmp_path, 3, total_steps=100_000) as cluster:
        job = Job(cluster)
        job.until_step(1)
        job.supervisors()[0].kill()
        job.until_it_is("FAILED", within_s=150)
        assert job.field("ExitCode") == "137:0"
        assert job.field("Restarts") == "0"
        assert not job.processes()
        assert not job.supervisors()
        assert "the leader has ended and others have not" in job.log()
