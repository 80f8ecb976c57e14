"""What the supervision of one server asks of it, on a fake one that answers or does not."""

from pathlib import Path
from random import Random
from types import SimpleNamespace

import anyio
import pytest

from fake_vllm import FakeVllm
from libra.config.model import ModelConfig
from libra.config.rollout import HeterogeneousRolloutConfig, SchedulingConfig
from libra.config.run import RunConfig
from libra.config.supervision import SupervisionConfig
from libra.errors import ChildError
from libra.ids import Incarnation, InstanceId, RunId, SlotId
from libra.planner.plan import InstancePlacement
from libra.scheduling.scheduler import Scheduler
from libra_supervisor.app import engine_watch as engine_watch_module
from libra_supervisor.app.engine import Engine, EngineSite
from libra_supervisor.instances import client as client_module
from libra_supervisor.instances.serving_meter import ServingMeter
from libra_supervisor.instances.transport import CallLimits
from libra_supervisor.run_directory import RunDirectory

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
STALL_S = 0.5
TOKEN = "secret"


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch):
    """With a server that does not answer."""
    limits = CallLimits(connect_s=1.0, first_byte_s=0.5, whole_s=1.0)
    monkeypatch.setattr(client_module, "SHORT_CALL", limits)
    monkeypatch.setattr(engine_watch_module, "PROBE_TIMEOUT_S", 1.0)


@pytest.fixture
async def server():
    async with FakeVllm("vllm-0", token=TOKEN, run_id="r") as server:
        yield server


@pytest.fixture
async def engine(server):
    placement = InstancePlacement(instance_id=InstanceId("vllm-0"), tp=1, slots=(SlotId(0),))
    config = RunConfig(
        model=ModelConfig(model_path="/m"),
        supervision=SupervisionConfig(liveness_stall_s=STALL_S),
        heterogeneous_rollout=HeterogeneousRolloutConfig(
            scheduling=SchedulingConfig(metrics_poll_interval_s=0.1)
        ),
    )
    site = EngineSite(
        run_id=RunId("r"),
        directory=RunDirectory(Path("/r")),
        config=config,
        device="cpu",
        host="127.0.0.1",
        token=TOKEN,
        token_file=Path("/r/token"),
        env={},
        devices=("0",),
        meter=ServingMeter({"vllm-0": 1}),
    )
    scheduler = Scheduler(config.heterogeneous_rollout.scheduling)
    engine = Engine(
        site, placement, scheduler, port=0, served_directory=lambda: None, rng=Random(0)
    )
    await engine.take_over({"url": server.url})
    yield engine
    await engine.close()


def child_of(server):
    return SimpleNamespace(incarnation=Incarnation(server.incarnation))


async def found(engine, server):
    """Why it is stuck."""
    with anyio.fail_after(30.0):
        return await engine.until_stuck(child_of(server))


async def test_a_server_that_hangs_before_it_was_looked_at_is_not_loading(server, engine):
    server.hang = {"/"}
    assert "it has been silent" in await found(engine, server)


async def test_of_a_sleeper_health_alone_is_asked_and_a_silent_one_is_not_probed(server, engine):
    await engine.slumber.begin(engine.client)
    server.calls.clear()
    with anyio.move_on_after(1.5) as scope:
        await engine.until_stuck(child_of(server))
    assert scope.cancelled_caught, "a healthy sleeper was found stuck"
    assert {path for _, path in server.calls} == {"/health"}
    server.hang = {"/"}
    server.calls.clear()
    assert "it has been silent" in await found(engine, server)
    assert {path for _, path in server.calls} == {"/health"}


async def test_a_sleeper_of_an_earlier_supervisor_is_not_ready(server, engine):
    await engine.client.sleep(timeout_s=5.0)
    with pytest.raises(ChildError, match="it sleeps, and whoever put it to sleep is gone"):
        await engine.until_ready(child_of(server))


async def test_nothing_is_started_in_the_place_of_a_sleeper(server, engine):
    assert await engine.hindrance() is None
    await engine.slumber.begin(engine.client)
    assert await engine.hindrance() == "its devices are lent to training"
    await engine.slumber.end(engine.client)
    assert await engine.hindrance() is None
