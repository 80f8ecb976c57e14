"""Runs inside a container booted by the test: drives the unit and writes down what it saw.

unit_driver.py UNIT RUN_DIR RESULT.json

Every wait is bounded, and one that is over says what the unit, its jobs and its processes did.
"""

import json
import os
import pwd
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

unit, run_dir, result_path = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
seen = {}

WHOLE_S = 440
"""Less than the test waits for the container."""


def systemctl(*arguments, check=True, within_s=150):
    try:
        done = subprocess.run(
            ["systemctl", *arguments], capture_output=True, text=True, timeout=within_s
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"systemctl {arguments} took {within_s} s; {situation()}") from None
    if check and done.returncode:
        raise RuntimeError(f"systemctl {arguments}: {done.stderr}")
    return done.stdout.strip()


def show(name):
    return systemctl("show", f"--property={name}", "--value", unit, within_s=30)


def situation():
    """What an operator would look at."""
    said = [str(children())]
    for argv in (
        ["systemctl", "show", "--property=ActiveState,SubState,MainPID,StatusText,Result", unit],
        ["systemctl", "list-jobs", "--no-pager"],
        ["ps", "-eo", "pid,ppid,stat,etimes,wchan:20,args"],
    ):
        try:
            said.append(subprocess.run(argv, capture_output=True, text=True, timeout=20).stdout)
        except subprocess.TimeoutExpired:
            said.append(f"{argv} does not answer")
    return "\n".join(said)


def at(step):
    print(f"{time.monotonic():.1f} {step}", flush=True)


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


def until(condition, within_s=120):
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {within_s} s; {situation()}")
        time.sleep(0.1)
    return value


def steps_done():
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def owner_of(pid):
    return pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name


def restarted_after(old_main):
    until(lambda: show("ActiveState") == "active" and show("MainPID") not in ("0", old_main))
    return show("MainPID")


def steps():
    at("start")
    began = time.monotonic()
    systemctl("start", unit)
    seen["start_s"] = time.monotonic() - began
    seen["state"], main = show("ActiveState"), show("MainPID")
    seen["user"] = owner_of(main)
    first = until(lambda: len(servers()) == 4 and servers())
    arguments = Path(f"/proc/{main}/cmdline").read_bytes().decode().split("\0")
    (token,) = (word for word in arguments if word.startswith("api.api_token_file="))
    seen["token_is_a_credential"] = token.startswith("api.api_token_file=/run/credentials/")
    until(lambda: steps_done() >= 2)
    seen["steps_before_sigkill"] = steps_done()
    at("SIGKILL")
    os.kill(int(main), signal.SIGKILL)
    main = restarted_after(main)
    time.sleep(1.0)
    seen["adopted_after_sigkill"] = servers() == first
    at("stall")
    os.kill(int(main), signal.SIGUSR2)
    until(lambda: show("MainPID") != main)
    seen["stall"] = subprocess.run(
        ["journalctl", "-u", unit, "-o", "cat", "--no-pager"],
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout.count("Watchdog timeout")
    restarted_after(main)
    time.sleep(1.0)
    seen["adopted_after_watchdog"] = servers() == first
    before = steps_done()
    until(lambda: steps_done() >= before + 2)
    seen["steps_after_watchdog"] = steps_done()
    at("stop")
    systemctl("stop", unit)
    seen["left_after_stop"] = children()
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    seen["checkpoint_after_stop"] = (run_dir / "checkpoints" / f"step_{last:06d}").is_dir()
    systemctl("reset-failed", unit, check=False)
    at("start again")
    systemctl("start", unit)
    until(lambda: len(servers()) == 4)
    at("SIGKILL, and stop while waiting")
    os.kill(int(show("MainPID")), signal.SIGKILL)
    until(lambda: show("SubState") == "auto-restart")
    seen["left_while_waiting"] = len(servers())
    systemctl("stop", unit)
    until(lambda: not children())
    seen["left_after_stop_while_waiting"] = children()
    # What another try cannot mend: the unit fails with 2 and is not started again.
    at("exit 2")
    config = Path("/etc/libra/fake.yaml")
    config.write_text(config.read_text().replace("rollout_gpus: 2", "rollout_gpus: 3"))
    systemctl("reset-failed", unit, check=False)
    restarts = int(show("NRestarts"))
    systemctl("start", unit, check=False)
    until(lambda: show("ActiveState") == "failed")
    time.sleep(6.0)
    restarts = int(show("NRestarts")) - restarts
    seen["after_exit_2"] = [
        show("ActiveState"),
        show("ExecMainStatus"),
        restarts,
        children(),
    ]


def time_is_over(_signum, _frame):
    raise RuntimeError(f"not done within {WHOLE_S} s; {situation()}")


signal.signal(signal.SIGALRM, time_is_over)
signal.alarm(WHOLE_S)
try:
    steps()
except BaseException:
    signal.alarm(0)
    seen["error"] = traceback.format_exc()
    seen["journal"] = subprocess.run(
        ["journalctl", "-b", "-o", "short-monotonic", "--no-pager", "-n", "200"],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
at("done")
result_path.write_text(json.dumps(seen))
