"""ExecStopPost of the systemd unit: leave nothing behind, unless a restart is coming.

    python -m libra_supervisor.process.unit_sweep UNIT

KillMode=process lets servers outlive a crashed supervisor, so that the next one adopts them. So
systemd ends nothing but the main process, and the rest is this program's: after a clean end it
kills what is left in the unit's cgroup. After a failure it starts a guard, which waits until the
unit is up again (and leaves) or down for good (and kills).
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from libra_supervisor.process.cgroup import Cgroup, own_cgroup

_CONTROL_GROUP: Final = ".control"
_SUCCESS: Final = "success"
_GUARD: Final = "--guard"
_POLL_S: Final = 1.0
_SYSTEMCTL_WAIT_S: Final = 10.0
_SWEEPS_TO_BE_SURE: Final = 2
_KILL_WAIT_S: Final = 10.0
_NUM_UNANSWERED: Final = 30


def main(arguments: list[str], service_result: str) -> int:
    unit = arguments[0]
    group = unit_group()
    if group is None or Path(group.path).name != unit:
        # Anywhere else this would kill the shell that tries it out.
        sys.stderr.write(f"this process is not in the cgroup of {unit}: nothing is swept\n")
        return 1
    if _GUARD in arguments:
        return guard(unit, group)
    if service_result == _SUCCESS:
        return _kill_all(group)
    _start_guard(unit)
    return 0


def unit_group() -> Cgroup | None:
    """The unit's group; control processes of a delegated unit run in one below it."""
    own = own_cgroup()
    if own is None:
        return None
    path = Path(own)
    return Cgroup(str(path.parent if path.name == _CONTROL_GROUP else path))


def guard(unit: str, group: Cgroup) -> int:
    """Wait for the unit to be up again or down for good; in the second case kill what is left."""
    num_unanswered = 0
    while num_unanswered < _NUM_UNANSWERED:
        state = _state_of(unit)
        if state in {"active", "activating/start", "reloading"}:
            return 0
        if state in {"inactive", "failed"}:
            return _kill_all(group)
        num_unanswered = num_unanswered + 1 if state == "" else 0
        time.sleep(_POLL_S)
    sys.stderr.write(f"systemctl does not say what {unit} does; left as it is\n")
    return 1


def _state_of(unit: str) -> str:
    """ActiveState, with the sub-state while activating; empty when systemd does not answer."""
    argv = ["systemctl", "show", "--property=ActiveState,SubState", unit]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed program and the unit's own name
            argv, capture_output=True, text=True, timeout=_SYSTEMCTL_WAIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    active, sub = found.get("ActiveState", ""), found.get("SubState", "")
    if active != "activating":
        return active
    return "activating/auto-restart" if sub == "auto-restart" else "activating/start"


def _start_guard(unit: str) -> None:
    subprocess.Popen(  # noqa: S603 - this very program
        [sys.executable, "-m", "libra_supervisor.process.unit_sweep", unit, _GUARD],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _kill_all(group: Cgroup) -> int:
    """SIGKILL everything in the group but this process, until two looks find nothing."""
    give_up_at = time.monotonic() + _KILL_WAIT_S  # noqa: TID251 - a program of its own
    num_empty = 0
    while num_empty < _SWEEPS_TO_BE_SURE:
        pids = [pid for pid in group.pids() if pid != os.getpid()]
        num_empty = 0 if pids else num_empty + 1
        for pid in pids:
            _kill(pid)
        if pids and time.monotonic() > give_up_at:  # noqa: TID251
            sys.stderr.write(f"processes {pids} do not end\n")
            return 1
        time.sleep(0.01)
    return 0


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ.get("SERVICE_RESULT", _SUCCESS)))  # noqa: TID251
