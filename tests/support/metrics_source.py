"""The metrics page of a run that has trained, dropped something and knows its forecasts."""

from random import Random

import anyio
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from control_world import RandomWorld
from fleets import fleet_of, place
from libra.planner.search import plan
from libra.wire.api import ChildStatus, NodeStatus, StatusSnapshot
from libra_supervisor.app.collector import RunCollector, Sources, registry_of
from libra_supervisor.app.forecaster import Forecaster
from libra_supervisor.app.replan_desk import Outcomes
from libra_supervisor.events import ReconfigurationEnded
from libra_supervisor.instances.serving_meter import ServingMeter
from libra_supervisor.loop.stall import StallMeter
from libra_supervisor.records.calibration import empty_book
from libra_supervisor.records.reconfiguration import DecisionRecord
from libra_supervisor.records.trackers import Tracker, Trackers
from planner_cases import grp_config


def _engine(name: str, **signals: float) -> ChildStatus:
    nothing = {"num_queued": None, "kv_use_fraction": None, "signals_age_s": None}
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
        **{**nothing, **signals},
    )


STATUS = StatusSnapshot(
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
    last_decision="",
    children=(
        _engine("vllm-0", num_queued=4, kv_use_fraction=0.5, signals_age_s=2.0),
        _engine("vllm-1"),
    ),
    nodes=(NodeStatus(node=1, host="h", state="member", since_s=1.0, detail="", num_samples=5),),
    oldest_wait="",
)


def _unopened():
    raise AssertionError("no step was offered")


def _trained_world() -> RandomWorld:
    world = RandomWorld()
    world.failure_chance = 0.2
    world.boot()
    world.run(Random(0))
    assert world.control.desk.dropped_by_reason
    return world


def _looked() -> Outcomes:
    """One look, and a change that ended."""
    outcomes = Outcomes()
    outcomes.num_decisions["switch"] += 1
    outcomes.num_ended["done"] += 1
    outcomes.last = DecisionRecord(
        decision_id=1,
        wall_time_ns=1,
        step=1,
        verdict="switch",
        reason="worth it",
        numbers={"earned_s": 100.0, "price_s": 20.0},
        plan="",
    )
    outcomes.last_ended = ReconfigurationEnded(1, "done", 1.5, {"drain": 3.0}, "worth it")
    return outcomes


def trained_collector(world: RandomWorld | None = None) -> RunCollector:
    """Of `world`, whose run is over; of one that dropped something when none is given."""
    world = world or _trained_world()
    config = grp_config(planner={"initial_allocation_strategy": "configured"})
    forecaster = Forecaster(
        config,
        plan(config).plan,
        book=empty_book(config),
        store=None,
        meter=ServingMeter({}),
    )
    # A step in which no trajectory ended has no forecast of rollout.
    for command in (written for written in world.written if written.finished):
        forecaster(command)()
    trackers = Trackers([Tracker("tensorboard", _unopened)])
    trackers.close()
    scheduler = fleet_of(2, prefix_affinity=True)
    for prompt in ("a", "a", "a", "b"):
        place(scheduler, prompt=prompt)
    return RunCollector(
        world.control,
        lambda: STATUS,
        Sources(
            stalls=StallMeter(),
            forecaster=forecaster,
            trackers=trackers,
            scheduler=scheduler,
            outcomes=_looked(),
        ),
    )


def trained_registry() -> CollectorRegistry:
    return registry_of(trained_collector())


def metric_values(world: RandomWorld) -> dict[tuple[str, ...], float]:
    """By name and labels; the page reads the event loop's clock, as it is read inside one."""

    async def collect() -> list[Metric]:
        return list(trained_collector(world).collect())

    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in anyio.run(collect)
        for sample in family.samples
    }
