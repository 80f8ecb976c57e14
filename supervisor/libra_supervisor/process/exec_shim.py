"""Runs in the child before its program: joins the cgroup, sets limits, then becomes the program.

    python -I -S exec_shim.py SETTINGS_JSON PROGRAM [ARGUMENT]...

A separate start instead of code between fork and exec: the supervisor has threads, and only a
fresh process may run Python safely there. Standard library only; a failure is written to
`status_fd`, which closes by itself when the program starts.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def _bind_to_parent(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        # The parent died before the request; nobody would send the signal any more.
        sys.exit(1)


def _limit(kind: int, value: int | None) -> None:
    if value is None:
        return
    _, hard = resource.getrlimit(kind)
    ceiling = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (ceiling, ceiling if kind != resource.RLIMIT_NOFILE else hard))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:  # noqa: PTH123 - pathlib costs 5 ms a start
        file.write(text)


def _apply(settings: dict[str, Any]) -> None:
    # The group first: whatever is forked from here on is inside.
    if settings["cgroup"]:
        _write(f"{settings['cgroup']}/cgroup.procs", "0")
    if settings["bound_to"]:
        _bind_to_parent(settings["bound_to"])
    _limit(resource.RLIMIT_AS, settings["address_space_bytes"])
    _limit(resource.RLIMIT_NOFILE, settings["num_open_files"])
    _limit(resource.RLIMIT_CORE, settings["core_dump_bytes"])
    if settings["cpu_cores"]:
        os.sched_setaffinity(0, settings["cpu_cores"])
    if settings["nice"]:
        os.nice(settings["nice"])
    if settings["oom_score_adjust"] is not None:
        _write("/proc/self/oom_score_adj", str(settings["oom_score_adjust"]))
    # Python ignores these at start, and an ignored signal stays ignored over exec.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def main() -> None:
    settings = json.loads(sys.argv[1])
    status_fd = settings["status_fd"]
    os.set_inheritable(status_fd, False)
    try:
        _apply(settings)
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the purpose of this program
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        os.write(status_fd, f"{error.strerror or error}{where}".encode())
        os._exit(127)


if __name__ == "__main__":
    main()
