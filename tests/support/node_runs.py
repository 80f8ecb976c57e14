"""Whole runs over several hosts, as users start them, on fake servers and ranks."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from fake_runs import write_config
from netns_hosts import crash
from processes import CHILDREN

TOKEN = "a token of these nodes"
SUPERVISOR = [sys.executable, str(CHILDREN / "fake_run.py")]


class NodeRun:
    """One supervisor on each host."""

    def __init__(self, hosts, folder, *, program=None, **options):
        self.hosts, self.folder = hosts, folder
        hosts.at_end.append(self.sweep)
        self.program = program or SUPERVISOR
        self.run_dir = folder / "run"
        with socket.socket() as probe:
            probe.bind((hosts.addresses[0], 0))
            port = probe.getsockname()[1]
        nodes = [f"{hosts.addresses[0]}:{port}", *hosts.addresses[1:]]
        self.env_of = options.pop("env_of", {})
        """More of the environment, by rank."""

        self.by_slurm = options.pop("by_slurm", False)
        self.fence = hosts.fence() if options.pop("is_fenced", False) else []
        """Before the leader's program."""

        gpus = options.pop("gpus", (4, 4))
        self.overrides = [
            *("-o", f"rollout_gpus={gpus[0]}", "-o", f"train_gpus={gpus[1]}"),
            *("-o", f"heterogeneous_rollout.instances=[{{tp: 1, count: {gpus[0]}}}]"),
        ]
        if self.by_slurm:
            nodes = []
        options = {"nodes": nodes, "node_lease_s": 4, "node_orphan_grace_s": 20} | options
        base = options.pop("base", None)
        if base is None:
            self.config = write_config(folder, **options)
        else:
            self.config = folder / "run.yaml"
            self.config.write_text(json.dumps(base | options))
        self.processes = {}

    def start(self, rank, *more):
        argv = [
            *self.program, "run", str(self.config), "--run-dir", str(self.run_dir),
            *self.overrides, *more,
        ]  # fmt: skip
        env = {
            **os.environ,
            "LIBRA_NODE_TOKEN": TOKEN,
            "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p),
        }
        env |= self.env_of.get(rank, {})
        if self.by_slurm:
            env |= self.step_of(rank)
        else:
            argv += ["--node-rank", str(rank)]
        log = self.folder / f"node-{rank}.out"
        if rank:
            self.processes[rank] = self.hosts.run(rank, argv, log=log, env=env)
            return
        with log.open("ab") as out:
            process = subprocess.Popen([*self.fence, *argv], stdout=out, stderr=out, env=env)
        self.hosts.processes.append(process)
        self.processes[0] = process

    def step_of(self, rank):
        """What srun tells the task on a node of a step with one task on each."""
        first, count = self.hosts.addresses[0], len(self.hosts.addresses)
        step = {
            "JOB_ID": os.getpid(), "STEP_ID": 0, "JOB_NUM_NODES": count, "STEP_NUM_NODES": count,
            "NTASKS": count, "NODEID": rank, "PROCID": rank,
            "STEP_NODELIST": f"{first.rpartition('.')[0]}.[1-{count}]",
        }  # fmt: skip
        return {f"SLURM_{name}": str(value) for name, value in step.items()}

    def start_all(self, *more):
        for rank in range(len(self.hosts.addresses)):
            self.start(rank, *more)

    def crash(self, rank):
        if rank or self.fence:
            crash(self.processes[rank])
        else:
            self.processes[0].kill()
            self.processes[0].wait()

    def sweep(self):
        """End what a leader that was killed has left on this machine."""
        state = self.run_dir / "state.json"
        if state.exists():
            argv = [sys.executable, "-m", "libra_supervisor.process.sweep", str(state)]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            subprocess.run(argv, env=env, check=False)

    def steps(self):
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines()
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]

    def until(self, condition, *, within_s):
        deadline = time.monotonic() + within_s
        while not (found := condition()):
            assert time.monotonic() < deadline, self.said()
            for rank, process in self.processes.items():
                assert process.poll() in (None, 0), f"node {rank}: {self.said()}"
            time.sleep(0.1)
        return found

    def until_step(self, step, *, within_s=120):
        self.until(lambda: max(self.steps(), default=0) >= step, within_s=within_s)

    def wait_all(self, *, within_s=120):
        deadline = time.monotonic() + within_s
        codes = {}
        for rank, process in self.processes.items():
            try:
                codes[rank] = process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"node {rank} runs on:\n{self.said()}") from None
        return codes

    def call(self, *words):
        return self.call_bare(*words, "--run-dir", str(self.run_dir))

    def call_bare(self, *words):
        command = [*self.program, *words]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        return subprocess.run(command, capture_output=True, text=True, env=env)

    def state_of(self, child):
        answer = self.call("status", "--json")
        assert answer.returncode == 0, answer.stderr
        children = json.loads(answer.stdout)["children"]
        return next(it["state"] for it in children if it["child"] == child)

    def said(self):
        outs = sorted(self.folder.glob("node-*.out"))
        return "\n".join(f"== {path.name}\n{path.read_text()[-2500:]}" for path in outs)
