"""Runs inside a container booted by the test: drives the unit and writes down what it saw.

unit_driver.py UNIT RUN_DIR RESULT.json
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

unit, run_dir, result_path = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
seen = {}


def systemctl(*arguments, check=True):
    done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"systemctl {arguments}: {done.stderr}")
    return done.stdout.strip()


def show(name):
    return systemctl("show", f"--property={name}", "--value", unit)


def children():
    """Pids of the run's processes, the log relay aside."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            tags = [e.partition(b"=")[2].decode() for e in environ if e.startswith(b"LIBRA_CHILD")]
            if tags and state != "Z":
                found[int(entry.name)] = tags[0]
    return found


def servers():
    return sorted(pid for pid, tag in children().items() if tag.startswith("vllm"))


def until(condition, within_s=60):
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out; unit is {show('ActiveState')}, {children()}")
        time.sleep(0.1)
    return value


def restarted_after(old_main):
    until(lambda: show("ActiveState") == "active" and show("MainPID") not in ("0", old_main))
    return show("MainPID")


def steps():
    began = time.monotonic()
    systemctl("start", unit)
    seen["start_s"] = time.monotonic() - began
    seen["state"], seen["status"] = show("ActiveState"), show("StatusText")
    first = until(lambda: len(servers()) == 4 and servers())
    main = show("MainPID")
    os.kill(int(main), signal.SIGKILL)
    main = restarted_after(main)
    time.sleep(1.0)
    seen["adopted_after_sigkill"] = servers() == first
    os.kill(int(main), signal.SIGUSR1)
    until(lambda: show("MainPID") != main, within_s=60)
    seen["stall"] = subprocess.run(
        ["journalctl", "-u", unit, "-o", "cat", "--no-pager"], capture_output=True, text=True
    ).stdout.count("Watchdog timeout")
    restarted_after(main)
    time.sleep(1.0)
    seen["adopted_after_watchdog"] = servers() == first
    systemctl("stop", unit)
    seen["left_after_stop"] = children()
    systemctl("reset-failed", unit, check=False)
    systemctl("start", unit)
    until(lambda: len(servers()) == 4)
    os.kill(int(show("MainPID")), signal.SIGKILL)
    until(lambda: show("SubState") == "auto-restart")
    seen["left_while_waiting"] = len(servers())
    systemctl("stop", unit)
    until(lambda: not children(), within_s=30)
    seen["left_after_stop_while_waiting"] = children()
    systemctl("start", unit)
    until(lambda: len(servers()) == 4)
    os.kill(int(show("MainPID")), signal.SIGUSR2)
    until(lambda: show("ActiveState") == "failed")
    time.sleep(3.0)
    seen["after_exit_3"] = [show("ActiveState"), show("ExecMainStatus"), children()]


try:
    steps()
except BaseException:
    seen["error"] = traceback.format_exc()
    seen["journal"] = subprocess.run(
        ["journalctl", "-b", "-o", "short-monotonic", "--no-pager", "-n", "200"],
        capture_output=True,
        text=True,
    ).stdout
result_path.write_text(json.dumps(seen))
