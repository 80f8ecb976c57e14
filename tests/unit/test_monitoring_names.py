import json
import re
from pathlib import Path
from random import Random

import anyio
import pytest
import yaml

from control_world import RandomWorld
from libra.planner.search import plan
from libra.wire.api import StatusSnapshot
from libra_supervisor.app.collector import RunCollector
from libra_supervisor.app.forecaster import Forecaster
from libra_supervisor.instances.serving_meter import ServingMeter
from libra_supervisor.loop.stall import StallMeter
from libra_supervisor.records.trackers import Trackers
from planner_cases import grp_config

MONITORING = Path(__file__).resolve().parents[2] / "configs" / "monitoring"
METRIC = re.compile(r"\blibra_[a-z0-9_]+")


async def collected(collector):
    """The page reads the event loop's clock, as it is read inside one."""
    return list(collector.collect())


@pytest.fixture
def exported():
    """Names on the metrics page of a run that has trained a step and dropped something."""
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
        children=(),
        oldest_wait="",
    )
    config = grp_config(planner={"initial_allocation_strategy": "configured"})
    forecaster = Forecaster(
        config, plan(config).plan, book=None, store=None, meter=ServingMeter({})
    )
    stalls = StallMeter()
    collector = RunCollector(world.control, lambda: status, stalls, forecaster, Trackers())
    families = anyio.run(collected, collector)
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
