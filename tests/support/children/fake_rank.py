"""A trainer rank's side of the control socket, without torch or a model.

FAKE_RANK is JSON: {"rank": R, "attempts": [..], "does": WHAT} makes that rank misbehave on a
TrainStep of those attempts. WHAT: exit, kill, hang, fail, close, deaf (stop reading).
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec

from libra.wire.framing import FrameDecoder, encode_frame
from libra.wire.rank import (
    Heartbeat,
    Hello,
    ModelReady,
    RankCommand,
    RankFailed,
    Shutdown,
    StepTrained,
    TrainStep,
)

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["LIBRA_ATTEMPT"])
plan = json.loads(os.environ.get("FAKE_RANK", "{}"))
does = plan.get("does") if rank == plan.get("rank") and attempt in plan["attempts"] else None
if plan.get("ignores_sigterm"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
connection = socket.socket(socket.AF_UNIX)
connection.connect(os.environ["LIBRA_CONTROL"])


def say(event):
    connection.sendall(encode_frame(msgspec.msgpack.encode(event)))


def misbehave_here(step):
    say(Heartbeat(rank, step, "forward"))
    if does == "exit":
        os._exit(3)
    elif does == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif does == "fail":
        say(RankFailed(rank, plan.get("exit_code", 4), "loss is not finite"))
        os._exit(1)
    elif does == "close":
        connection.close()
    time.sleep(60)


trained = []


def obey(command):
    match command:
        case TrainStep(step=step):
            if does is not None and len(trained) >= plan.get("after", 0):
                misbehave_here(step)
            trained.append(step)
            say(Heartbeat(rank, step, "forward"))
            say(StepTrained(rank, step, None))
        case Shutdown():
            print(f"rank {rank} leaves", flush=True)
            sys.exit(0)


start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
run_id = os.environ["LIBRA_RUN_ID"]
gang = os.environ["LIBRA_GANG"]
say(Hello(run_id, attempt, rank, world, rank, rank, 0, 0, 0, 0, os.getpid(), start_ticks, gang))
say(ModelReady(rank, 0, 1000, 0.1))
print("rank", rank, "argv", sys.argv[1:], flush=True)
decoder = FrameDecoder()
while data := connection.recv(1 << 20):
    for frame in decoder.feed(data):
        obey(msgspec.msgpack.decode(frame, type=RankCommand))
print(f"rank {rank}: the supervisor is gone", flush=True)
sys.exit(1)
