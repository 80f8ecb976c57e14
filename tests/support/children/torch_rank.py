"""A rank under the real torchrun: gloo, the control socket, and one thing that goes wrong.

Modes (FAKE_RANK as in fake_rank.py): everything there, and `raise`: an exception under @record.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group("gloo")
    port = int(os.environ["MASTER_PORT"])
    print("master", port, "held by agent:", holds(os.getppid(), port), flush=True)
    plan = json.loads(os.environ.get("FAKE_RANK", "{}"))
    mine = int(os.environ["RANK"]) == plan.get("rank")
    if mine and plan["does"] == "raise" and int(os.environ["LIBRA_ATTEMPT"]) in plan["attempts"]:
        raise RuntimeError("the model does not fit")
    sys.argv = [str(Path(__file__).with_name("fake_rank.py")), *sys.argv[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


def holds(pid, port):
    """True when the process listens on the port."""
    sockets = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            listens = fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port
            if listens and f"socket:[{fields[9]}]" in sockets:
                return True
    return False


main()
