import json
import re
from pathlib import Path
from random import Random

import anyio
import pytest
import yaml
from prometheus_client import generate_latest

from control_world import RandomWorld
from metrics_source import trained_collector, trained_registry

MONITORING = Path(__file__).resolve().parents[2] / "configs" / "monitoring"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"
METRIC = re.compile(r"\blibra_[a-z0-9_]+")


def collected(world=None):
    """The page reads the event loop's clock, as it is read inside one."""

    async def collect():
        return list(trained_collector(world).collect())

    return anyio.run(collect)


@pytest.fixture
def exported():
    """Names on the metrics page of a run that has trained a step and dropped something."""
    families = collected()
    return {name for family in families for name in (family.name, f"{family.name}_total")}


def test_reloads_are_counted_by_outcome_and_measured_by_part():
    world = RandomWorld(total_steps=3)
    world.boot()
    rng = Random(1)
    while world.publishing != 2:
        world.step(rng)
    world.loads_to_fail.append("vllm-0")
    world.run(rng)
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in collected(world)
        for sample in family.samples
    }
    assert values["libra_reload_batches_total", "committed"] == 4
    assert values["libra_reload_batches_total", "caught_up"] == 1
    assert values["libra_reload_batches_total", "failed"] == 0
    assert values["libra_reload_quarantines_total",] == 1
    assert values["libra_reload_acks_refused_total",] == 0
    assert values["libra_reload_instance_seconds", "model_load"] == 0.1
    assert values["libra_reload_instance_seconds", "total"] == 0.2
    assert values["libra_reload_probe_difference",] == 0.0


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


def test_the_documented_table_is_the_page():
    """Every series with its type and labels, and no other."""
    table = re.findall(
        r"^\| `(libra_\w+)` \| (\w+) \| ([^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    documented = {name: (kind, labels.replace("`", "").strip()) for name, kind, labels in table}
    exported = {}
    for family in collected():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels}
        exported[name] = (family.type, ", ".join(sorted(labels)))
    assert documented == exported


def test_prometheus_own_library_reads_the_page_and_every_name_has_its_unit():
    async def read():
        return generate_latest(trained_registry()).decode()

    page = anyio.run(read)
    names = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    assert names
    units = ("_seconds", "_total", "_bytes", "_fraction", "_ratio", "_per_second")
    counts = {
        "libra_step", "libra_policy_version", "libra_instances", "libra_trajectories_running",
        "libra_trajectories_buffered", "libra_reward_mean", "libra_kl_mismatch",
        "libra_staleness_versions_mean", "libra_engine_requests_in_flight",
        "libra_engine_requests_queued", "libra_reload_probe_difference", "libra_plan_slots",
        "libra_node_trajectories",
    }  # fmt: skip
    assert {name for name in names if not name.endswith(units)} == counts


@pytest.mark.case("R-B18", "R-B23")
def test_engines_are_exported_with_the_age_of_their_signals_and_unknown_is_absent():
    values = {
        family.name: {s.labels["instance"]: s.value for s in family.samples}
        for family in collected()
        if family.name.startswith("libra_engine_")
    }
    assert values == {
        "libra_engine_requests_in_flight": {"vllm-0": 3, "vllm-1": 3},
        "libra_engine_requests_queued": {"vllm-0": 4},
        "libra_engine_kv_use_ratio": {"vllm-0": 0.5},
        "libra_engine_signals_age_seconds": {"vllm-0": 2.0},
    }


def test_what_each_node_makes_is_exported():
    (family,) = (it for it in collected() if it.name == "libra_node_trajectories")
    assert [(it.labels, it.value) for it in family.samples] == [({"node": "1"}, 5)]


@pytest.mark.case("R-B44", "R-B104")
def test_it_is_told_how_often_prompts_kept_to_their_prefix_and_how_often_not():
    (family,) = (f for f in collected() if f.name == "libra_prefix_affinity_lookups")
    counts = {sample.labels["outcome"]: sample.value for sample in family.samples}
    assert counts == {"new": 2, "kept": 2, "migrated": 0, "broken": 0}
