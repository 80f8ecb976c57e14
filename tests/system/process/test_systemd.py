import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from processes import CHILDREN

REPOSITORY = Path(__file__).parents[3]
UNIT_FILE = REPOSITORY / "systemd" / "libra-supervisor@.service"
UNIT = "libra-supervisor@fake.service"

SEEN_REPOSITORY = "/opt/libra-under-test"
SEEN_PREFIX = "/opt/libra-python"
"""Where the container has this checkout and its virtual environment, which may lie in a /tmp that
the container and PrivateTmp hide."""

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

OVERRIDE = """
[Service]
User=root
Group=root
ExecStart=
ExecStart={python} {children}/fake_supervisor.py /var/lib/libra/fake 12
ExecStopPost=
ExecStopPost={python} -m libra_supervisor.process.unit_sweep %n
Environment=PYTHONPATH={path}
TimeoutStartSec=8
WatchdogSec=6
RestartSec=4
"""
DRIVER = """
[Unit]
After=multi-user.target dbus.service
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


def install(root, host):
    python = f"{SEEN_PREFIX}/bin/{Path(sys.executable).name}"
    children = f"{SEEN_REPOSITORY}/{CHILDREN.relative_to(REPOSITORY)}"
    path = f"{SEEN_REPOSITORY}:{SEEN_REPOSITORY}/supervisor"
    (root / "etc/machine-id").unlink(missing_ok=True)
    units = root / "etc/systemd/system"
    (units / f"{UNIT_FILE.name}.d").mkdir(parents=True)
    shutil.copy(UNIT_FILE, units)
    shutil.copy(UNIT_FILE.with_name("libra.slice"), units)
    values = {"python": python, "children": children, "path": path, "unit": UNIT}
    (units / f"{UNIT_FILE.name}.d" / "test.conf").write_text(OVERRIDE.format(**values))
    (units / "driver.service").write_text(DRIVER.format(**values))
    (root / "etc/libra").mkdir()
    (root / "etc/libra/fake.token").write_text("secret\n")


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
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=280
        )
    assert (host / "result.json").exists(), done.stdout[-3000:]
    seen = json.loads((host / "result.json").read_text())
    assert "error" not in seen, seen["error"] + seen["journal"]
    assert (seen["state"], seen["status"]) == ("active", "2 servers ready")
    assert seen["start_s"] > 8, "longer than TimeoutStartSec: the time limit was extended"
    assert seen["adopted_after_sigkill"]
    assert seen["stall"] >= 1, "the watchdog ended a stalled event loop"
    assert seen["adopted_after_watchdog"]
    assert seen["left_after_stop"] == {}
    assert seen["left_while_waiting"] == 4
    assert seen["left_after_stop_while_waiting"] == {}
    assert seen["after_exit_3"] == ["failed", "3", {}]


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
