import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from fake_runs import write_config
from processes import CHILDREN

REPOSITORY = Path(__file__).parents[3]
UNIT_FILE = REPOSITORY / "systemd" / "libra-supervisor@.service"
UNIT = "libra-supervisor@fake.service"

SEEN_REPOSITORY = "/opt/libra-under-test"
SEEN_PREFIX = "/opt/libra-python"
"""Where the container has this checkout and its virtual environment, which may lie in a /tmp that
the container and PrivateTmp hide."""

CONTAINER_S = 470
"""More than the driver inside gives itself."""

pytestmark = [pytest.mark.system, pytest.mark.timeout(520)]

TIMES = """
[Service]
TimeoutStartSec=40
WatchdogSec=10
RestartSec=4
"""
"""Nothing else of the unit is changed: user, programs and hardening are those shipped."""

PROGRAM = """#!/bin/sh
export PYTHONPATH={path} FAKE_STEP_S=0.3
# Only the first start takes longer than TimeoutStartSec.
if [ -e "$STATE_DIRECTORY/fake/metrics.jsonl" ]; then
  export FAKE_SERVER='{{"hides": true}}'
else
  export FAKE_SERVER='{{"hides": true, "start_s": 42}}'
fi
exec {python} {children}/fake_run.py "$@"
"""
PYTHON = """#!/bin/sh
export PYTHONPATH={path}
exec {python} "$@"
"""
DRIVER = """
[Unit]
# As on any machine: who is not root asks systemd over the bus.
Wants=dbus.socket
After=multi-user.target dbus.socket
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
ExecStart={python} {children}/unit_driver.py {unit} /var/lib/libra/fake /host/result.json
StandardOutput=append:/host/driver.log
StandardError=append:/host/driver.log
"""


def run(*argv, **options):
    return subprocess.run(argv, check=True, capture_output=True, text=True, **options)


@contextmanager
def overlay_of_root(work):
    """A writable copy of / that costs nothing: the container's root."""
    run("mount", "-t", "tmpfs", "tmpfs", str(work))
    for name in ("up", "work", "merged"):
        (work / name).mkdir()
    root = work / "merged"
    options = f"lowerdir=/,upperdir={work}/up,workdir={work}/work"
    run("mount", "-t", "overlay", "overlay", "-o", options, str(root))
    try:
        yield root
    finally:
        run("umount", str(root))
        run("umount", str(work))


def booted(argv, console, *, within_s):
    """Run the container to its end, or until its time is over; what its console said."""
    with console.open("wb") as out:
        container = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        container.wait(within_s)
    except subprocess.TimeoutExpired:
        # It ends its own processes on SIGTERM; what it says about them is on the console.
        container.terminate()
        try:
            container.wait(20)
        except subprocess.TimeoutExpired:
            container.kill()
            container.wait()
    return console.read_text(errors="replace")


def install(root, host):
    python = f"{SEEN_PREFIX}/bin/{Path(sys.executable).name}"
    children = f"{SEEN_REPOSITORY}/{CHILDREN.relative_to(REPOSITORY)}"
    path = ":".join(f"{SEEN_REPOSITORY}{part}" for part in ("", "/supervisor", "/tests/support"))
    (root / "etc/machine-id").unlink(missing_ok=True)
    units = root / "etc/systemd/system"
    (units / f"{UNIT_FILE.name}.d").mkdir(parents=True)
    shutil.copy(UNIT_FILE, units)
    shutil.copy(UNIT_FILE.with_name("libra.slice"), units)
    values = {"python": python, "children": children, "path": path, "unit": UNIT}
    (units / f"{UNIT_FILE.name}.d" / "test.conf").write_text(TIMES)
    (units / "driver.service").write_text(DRIVER.format(**values))
    programs = root / "opt/libra/bin"
    programs.mkdir(parents=True)
    for name, text in (("libra-supervisor", PROGRAM), ("python", PYTHON)):
        (programs / name).write_text(text.format(**values))
        (programs / name).chmod(0o755)
    follow_readme(root)


def follow_readme(root):
    """The steps of systemd/README.md that make the user, the configuration and the token."""
    # The interpreter of this machine may lie in root's home; what the unit's user may read counts.
    (root / "root").chmod(0o755)
    run("useradd", "-R", str(root), "--system", "--home-dir", "/var/lib/libra", "libra")
    group = int(run("chroot", str(root), "id", "-g", "libra").stdout)
    folder = root / "etc/libra"
    folder.mkdir(mode=0o750)
    (root / "srv/libra").mkdir()
    config = write_config(root / "srv/libra", total_steps=1_000_000)
    text = config.read_text().replace(str(root), "")
    config.unlink()
    (folder / "fake.yaml").write_text(text)
    (folder / "fake.yaml").chmod(0o640)
    (folder / "fake.token").write_text("secret\n")
    (folder / "fake.token").chmod(0o600)
    os.chown(folder, 0, group)
    os.chown(folder / "fake.yaml", 0, group)


@pytest.mark.case("R-B76", "R-B77", "R-B74")
def test_the_unit_under_a_real_systemd(tmp_path):
    host = tmp_path / "host"
    host.mkdir()
    work = tmp_path / "work"
    work.mkdir()
    with overlay_of_root(work) as root:
        install(root, host)
        argv = ["systemd-nspawn", "-q", "-D", str(root), "--register=no", "--keep-unit"]
        argv += [f"--bind={host}:/host", f"--bind-ro={REPOSITORY}:{SEEN_REPOSITORY}"]
        argv += [f"--bind-ro={sys.prefix}:{SEEN_PREFIX}"]
        argv += ["-b", "--console=pipe", "systemd.unit=driver.service"]
        console = booted(argv, host / "console.log", within_s=CONTAINER_S)
    driver = (host / "driver.log").read_text() if (host / "driver.log").exists() else "none"
    assert (host / "result.json").exists(), f"console: {console[-3000:]}\ndriver: {driver}"
    seen = json.loads((host / "result.json").read_text())
    assert "error" not in seen, seen["error"] + seen["journal"]
    assert seen["user"] == "libra"
    assert seen["state"] == "active"
    assert seen["token_is_a_credential"]
    assert seen["start_s"] > 40, "longer than TimeoutStartSec: the time limit was extended"
    assert seen["adopted_after_sigkill"]
    assert seen["stall"] >= 1, "the watchdog ended a stalled event loop"
    assert seen["adopted_after_watchdog"]
    assert seen["left_after_stop"] == {}
    assert seen["left_while_waiting"] == 4
    assert seen["left_after_stop_while_waiting"] == {}
    assert seen["steps_after_watchdog"] > seen["steps_before_sigkill"] > 0
    assert seen["checkpoint_after_stop"], "SIGTERM saves"
    assert seen["after_exit_2"] == ["failed", "2", 0, {}], "not started again"


def test_systemd_finds_no_fault_with_the_units_and_rates_them_ok(tmp_path):
    text = UNIT_FILE.read_text()
    for program in ("/opt/libra/bin/libra-supervisor", "/opt/libra/bin/python"):
        text = text.replace(program, "/bin/true")
    unit = tmp_path / UNIT_FILE.name
    unit.write_text(text)
    shutil.copy(UNIT_FILE.with_name("libra.slice"), tmp_path)
    env = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
    verified = run(
        "systemd-analyze",
        "verify",
        "--man=no",
        str(tmp_path / "libra-supervisor@x.service"),
        env=env,
    )
    assert verified.stderr == ""
    rated = run("systemd-analyze", "security", "--offline=yes", "--no-pager", str(unit))
    exposure = rated.stdout.strip().splitlines()[-1]
    assert " OK " in exposure, exposure
