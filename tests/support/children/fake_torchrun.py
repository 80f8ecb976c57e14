"""torchrun's behaviour towards its ranks, without torch: sessions of their own, one dies, all end.

It speaks the options that libra_supervisor.ranks.torchrun passes, prints the same report, and
leaves ranks that ignore SIGTERM alone until TORCH_ELASTIC_SHUTDOWN_TIMEOUT, as the real one does.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("max-restarts", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "local-addr"):
    parser.add_argument(f"--{name}")
for name in ("master-addr", "master-port"):
    parser.add_argument(f"--{name}", default="")
parser.add_argument("--nnodes", type=int)
parser.add_argument("--node-rank", type=int, default=0)
parser.add_argument("--nproc-per-node", type=int)
parser.add_argument("--log-dir")
parser.add_argument("program", nargs=argparse.REMAINDER)
options = parser.parse_args()


def places():
    """(first rank here, ranks of all): agents are alike, or the run says how many ranks there are.

    Then two agents have any shares of them.
    """
    first, world = (
        options.node_rank * options.nproc_per_node,
        options.nnodes * options.nproc_per_node,
    )
    if options.nnodes != 2 or "--config" not in options.program:
        return first, world
    config = Path(options.program[options.program.index("--config") + 1])
    if not config.exists():
        return first, world
    world = json.loads(config.read_text())["training"]["train_gpus"]
    return (world - options.nproc_per_node if options.node_rank else 0), world


def start(local_rank):
    first, world = places()
    rank = first + local_rank
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)}
    env |= {"MASTER_ADDR": options.master_addr, "MASTER_PORT": options.master_port}
    argv = [sys.executable, *options.program]
    return subprocess.Popen(argv, env=env, start_new_session=True)


def end(ranks, signum):
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signum)
    deadline = time.monotonic() + float(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)


def on_signal(signum, frame):
    end(ranks, signum)
    sys.exit(1)


ranks = [start(rank) for rank in range(options.nproc_per_node)]
signal.signal(signal.SIGTERM, on_signal)
while any(rank.poll() is None for rank in ranks):
    time.sleep(0.02)
    failed = [(k, rank) for k, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
    if failed:
        k, rank = failed[0]
        end(ranks, signal.SIGTERM)
        first, _ = places()
        sys.stderr.write(
            "Root Cause (first observed failure):\n[0]:\n"
            f"  rank      : {first + k} (local_rank: {k})\n"
            f"  exitcode  : {rank.returncode} (pid: {rank.pid})\n"
        )
        sys.exit(1)
