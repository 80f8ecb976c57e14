import json
import re
from pathlib import Path
from random import Random

import anyio
import pytest
import yaml

from control_world import RandomWorld
from libra.planner.search import plan
from libra.wire.api import ChildStatus, StatusSnapshot
from libra_supervisor.app.collector import RunCollector
from libra_supervisor.app.forecaster import Forecaster
from libra_supervisor.instances.serving_meter import ServingMeter
from libra_supervisor.loop.stall import StallMeter
from planner_cases import grp_config

MONITORING = Path(__file__).resolve().parents[2] / "configs" / "monitoring"
METRIC = re.compile(r"\blibra_[a-z0-9_]+")


async def collected(collector):
    """The page reads the event loop's clock, as it is read inside one."""
    return list(collector.collect())


def engine(name, **signals):
    base = {"num_queued": None, "kv_use_fraction": None, "signals_age_s": None} | signals
    return ChildStatus(
        child=name,
        role="rollout",
        state="serving",
        since_s=1.0,
        pid=2,
        num_restarts=0,
        policy_version=1,
        num_in_flight=3,
        last_error="",
        **base,
    )


@pytest.fixture
def families():
    """The metrics page of a run that has trained a step and dropped something."""
    world = RandomWorld()
    world.boot()
    world.run(Random(0))
    status = StatusSnapshot(
        run_id="r",
        run_directory="/r",
        pid=1,
        phase="training",
        step=1,
        total_steps=None,
        policy_version=1,
        waiting_for="",
        reward_mean=None,
        num_running=0,
        num_buffered=0,
        uptime_s=1.0,
        eta_s=None,
        plan="",
        children=(
            engine("vllm-0", num_queued=4, kv_use_fraction=0.5, signals_age_s=2.0),
            engine("vllm-1"),
        ),
        oldest_wait="",
    )
    config = grp_config(planner={"initial_allocation_strategy": "configured"})
    forecaster = Forecaster(
        config, plan(config).plan, book=None, store=None, meter=ServingMeter({})
    )
    stalls = StallMeter()
    collector = RunCollector(world.control, lambda: status, stalls, forecaster)
    return anyio.run(collected, collector)


@pytest.fixture
def exported(families):
    return {name for family in families for name in (family.name, f"{family.name}_total")}


def expressions_of_alerts():
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def expressions_of_dashboard():
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


@pytest.mark.parametrize("read", [expressions_of_alerts, expressions_of_dashboard])
def test_every_metric_that_is_watched_is_exported(read, exported):
    watched = {name for expression in read() for name in METRIC.findall(expression)}
    assert watched
    assert watched <= exported


def test_every_alert_says_what_happened_and_what_to_do():
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        assert rule["labels"]["severity"] in {"page", "warn", "info"}
        assert rule["annotations"].keys() == {"summary", "action"}


def test_no_two_panels_of_the_dashboard_overlap():
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    places = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24


@pytest.mark.case("R-B18", "R-B23")
def test_engines_are_exported_with_the_age_of_their_signals_and_unknown_is_absent(families):
    values = {
        family.name: {s.labels["instance"]: s.value for s in family.samples}
        for family in families
        if family.name.startswith("libra_engine_")
    }
    assert values == {
        "libra_engine_requests_in_flight": {"vllm-0": 3, "vllm-1": 3},
        "libra_engine_requests_queued": {"vllm-0": 4},
        "libra_engine_kv_use_ratio": {"vllm-0": 0.5},
        "libra_engine_signals_age_seconds": {"vllm-0": 2.0},
    }
