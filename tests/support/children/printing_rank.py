"""A rank that prints in every way there is, through the trainer's own end of the control socket.

On a TrainStep it ends as a hanging rank does whose stack is dumped: by SIGABRT.
"""

import ctypes
import faulthandler
import os
from pathlib import Path

from libra.trainer.link import Link
from libra.wire.rank import Hello, ModelReady, TrainStep

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt, run_id = int(os.environ["LIBRA_ATTEMPT"]), os.environ["LIBRA_RUN_ID"]
link = Link(Path(os.environ["LIBRA_CONTROL"]))
libc = ctypes.CDLL(None)
start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
link.send_output(
    Hello(run_id, attempt, rank, world, rank, rank, 0, 0, 0, 0, os.getpid(), start_ticks)
)
for k in range(200):
    libc.puts(f"C says {k}".encode())
    libc.fflush(None)
print("Python says", flush=True)
os.write(2, b"half a line, ")
link.send(ModelReady(rank, 0, 1, 0.0))
os.write(2, b"and the rest\n")
if isinstance(link.receive(), TrainStep):
    faulthandler.enable()
    os.abort()
