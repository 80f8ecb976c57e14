"""The shipped Prometheus files, read by Prometheus's own tool (Debian package `prometheus`)."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "configs" / "monitoring"

pytestmark = [pytest.mark.system, pytest.mark.timeout(60)]


def promtool(*arguments, cwd=MONITORING):
    return subprocess.run(
        ["promtool", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def test_prometheus_accepts_the_configuration_and_its_rules():
    checked = promtool("check", "config", "prometheus.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_alerts_fire_when_they_should_and_only_then(tmp_path):
    # promtool finds rule files beside the test file.
    for file in (MONITORING / "alerts.yaml", Path(__file__).with_name("alerts_test.yaml")):
        shutil.copy(file, tmp_path)
    tested = promtool("test", "rules", "alerts_test.yaml", cwd=tmp_path)
    assert tested.returncode == 0, tested.stdout + tested.stderr
