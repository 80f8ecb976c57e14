"""Debian's Prometheus reads a live /metrics with the shipped configuration, rules and dashboard."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from prometheus_client import generate_latest

from libra.config.supervision import ApiConfig
from libra.wire.api import VerbReply
from libra_supervisor.api.server import api_server
from metrics_source import STATUS, trained_registry

MONITORING = Path(__file__).resolve().parents[3] / "configs" / "monitoring"
SETTLE_S = 60.0

pytestmark = [pytest.mark.system, pytest.mark.timeout(120), pytest.mark.anyio]


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Control:
    """A run's page behind the real API."""

    def __init__(self):
        self._registry = trained_registry()

    def status(self):
        return STATUS

    def is_ready(self):
        return True

    def metrics_text(self):
        return generate_latest(self._registry)

    async def do(self, verb, request):
        return VerbReply(ok=False, message=f"{verb} {request.target}")


@contextmanager
def prometheus(directory: Path, target: str):
    """Prometheus with the shipped files, looking at `target` every second; yields its address."""
    shutil.copy(MONITORING / "alerts.yaml", directory)
    given = (MONITORING / "prometheus.yaml").read_text()
    assert "127.0.0.1:8080" in given
    changed = given.replace("127.0.0.1:8080", target).replace("interval: 10s", "interval: 1s")
    (directory / "prometheus.yaml").write_text(changed)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={directory / 'prometheus.yaml'}"]
    command += [f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address={address}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield address
    finally:
        process.terminate()
        process.wait(20)


def asked(address: str, path: str, **parameters: str):
    """Prometheus's answer, or None while it does not give one."""
    query = urllib.parse.urlencode(parameters)
    try:
        with urllib.request.urlopen(f"http://{address}/api/v1/{path}?{query}", timeout=5) as answer:
            return json.load(answer)["data"]
    except OSError:
        return None


def until(condition):
    deadline = time.monotonic() + SETTLE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "Prometheus does not come to that"
        time.sleep(0.2)
    return found


def expressions() -> list[str]:
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [expression.replace("$job", "libra") for expression in found]


def look(directory: Path, port: int) -> None:
    with prometheus(directory, f"127.0.0.1:{port}") as address:
        up = until(lambda: (asked(address, "query", query="up") or {}).get("result"))
        until(lambda: asked(address, "query", query="libra_step")["result"])
        assert up[0]["metric"]["job"] == "libra"
        assert asked(address, "targets")["activeTargets"][0]["lastError"] == ""
        groups = until(lambda: asked(address, "rules")["groups"])
        rules = [rule for group in groups for rule in group["rules"]]
        assert len(rules) == (MONITORING / "alerts.yaml").read_text().count("- alert:")
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        seen = set(asked(address, "label/__name__/values"))
        for expression in expressions():
            assert asked(address, "query", query=expression) is not None, expression
            assert set(re.findall(r"libra_\w+", expression)) <= seen, expression
        errors = asked(address, "query", query="libra_prediction_error_fraction")["result"]
        assert {row["metric"]["side"] for row in errors} == {"train", "rollout"}


async def test_prometheus_scrapes_a_live_page_and_finds_what_the_dashboard_shows(tmp_path):
    config = ApiConfig(api_port=0)
    async with api_server(
        Control(), config=config, socket_path=tmp_path / "control.sock", token="t"
    ) as port:
        await anyio.to_thread.run_sync(look, tmp_path, port)
