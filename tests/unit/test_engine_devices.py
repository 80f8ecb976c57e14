"""From the plan's slots to what a server's process sees, for engines of different size."""

from pathlib import Path
from random import Random

import anyio
import pytest

from libra.config.model import ModelConfig
from libra.config.rollout import HeterogeneousRolloutConfig, RolloutConfig, TpBucket
from libra.config.run import RunConfig
from libra.config.training import TrainingConfig
from libra.ids import Incarnation, RunId
from libra.planner.plan import configured_plan
from libra.scheduling.scheduler import Scheduler
from libra_supervisor.app.engine import Engine, EngineSite
from libra_supervisor.instances.serving_meter import ServingMeter
from libra_supervisor.run_directory import RunDirectory

DEVICES = tuple(f"GPU-{letter}" for letter in "abcdefghi")


def engines(config, plan, **options):
    site = EngineSite(
        run_id=RunId("r"),
        directory=RunDirectory(Path("/r")),
        config=config,
        device="cuda",
        host="127.0.0.1",
        token="t",
        token_file=Path("/r/token"),
        env={},
        devices=DEVICES,
        meter=ServingMeter({it.instance_id: it.tp for it in plan.instances}),
        cores=tuple((2 * slot, 2 * slot + 1) for slot in range(len(DEVICES))),
    )
    scheduler = Scheduler(config.heterogeneous_rollout.scheduling)
    return [
        Engine(site, it, scheduler, port=0, served_directory=lambda: None, rng=Random(0), **options)
        for it in plan.instances
    ]


async def started_with(engine):
    spec = await engine.spec(Incarnation("x"))
    await engine.close()
    tp = spec.argv[spec.argv.index("--tensor-parallel-size") + 1]
    devices = spec.env["CUDA_VISIBLE_DEVICES"].split(",")
    near = [core for it in devices for core in (2 * DEVICES.index(it), 2 * DEVICES.index(it) + 1)]
    assert list(spec.limits.cpu_cores) == near, "on the cores beside its devices"
    return int(tp), devices


@pytest.mark.case("T-B71")
@pytest.mark.parametrize("tps", [(1, 2, 4), (4, 2, 1), (1, 2), (2, 1, 1)])
def test_engines_of_different_size_get_neighbouring_devices_and_none_twice(tps):
    config = RunConfig(
        model=ModelConfig(model_path="/m"),
        training=TrainingConfig(train_gpus=2),
        rollout=RolloutConfig(rollout_gpus=sum(tps)),
        heterogeneous_rollout=HeterogeneousRolloutConfig(
            instances=tuple(TpBucket(tp=tp, count=1) for tp in tps)
        ),
    )
    plan = configured_plan(config)

    async def all_started():
        return [await started_with(engine) for engine in engines(config, plan)]

    started = anyio.run(all_started)
    assert [tp for tp, _ in started] == list(tps)
    assert [len(devices) for _, devices in started] == list(tps)
    used = [device for _, devices in started for device in devices]
    used += [DEVICES[slot] for slot in plan.train.slots]
    assert used == list(DEVICES[: sum(tps) + 2]), "in order, without a gap, each once"
    assert plan.train.world_size == 2


def test_a_server_is_drained_when_no_node_has_a_request_there():
    config = RunConfig(model=ModelConfig(model_path="/m"), rollout=RolloutConfig(rollout_gpus=1))
    asked = []

    class Elsewhere:
        """Another node has two requests there, which end one after the other."""

        def num_in_flight(self, instance_id):
            asked.append(instance_id)
            return max(0, 3 - len(asked))

    (engine,) = engines(config, configured_plan(config), traffic=Elsewhere())
    anyio.run(engine.drain, None)
    assert asked == ["vllm-0"] * 3
