"""A `World` of one core and one server, which hybrid replicas may borrow."""

import msgspec

from control_parts import plan_of
from control_world import RandomWorld
from hybrid_world import HybridWorld
from libra.config.model import ModelConfig
from libra.config.planning import PlannerConfig
from libra.config.run import RunConfig
from libra.config.training import TrainingConfig
from libra.ids import InstanceId, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement, Plan
from libra.pools.change_policy import policy_of
from libra.wire.rank import StepTrained
from libra_supervisor import events
from libra_supervisor.loop.plan_desk import PlanDesk

SERVER = InstanceId("vllm-0")
ALONE = plan_of([SERVER])
"""The server on slot 0, the core on slot 1."""

TIMEOUT_S = 50.0
OPTIONS = {
    "runtime_dynamic_reconfiguration_enabled": True,
    "runtime_reconfigure_training": True,
    "elastic_hybrid_min_rollout_gpus": 0,
    "runtime_reconfigure_timeout_s": TIMEOUT_S,
}
CONFIG = RunConfig(
    model=ModelConfig(model_path="m"),
    training=TrainingConfig(batch_size=4, micro_batch_size=1),
)


def lent(plan: Plan = ALONE) -> Plan:
    """With the server's slot given to a replica."""
    replica = HybridPlacement(replica_id=ReplicaId("any"), slots=(SlotId(0),))
    return msgspec.structs.replace(plan, instances=(), hybrids=(replica,))


def lending(*, memory=None, planner=None, **options) -> HybridWorld:
    """A world that has begun; rollouts may be `max_concurrent` trajectories ahead."""
    policy = policy_of(msgspec.convert({**OPTIONS, **(planner or {})}, PlannerConfig), num_slots=2)
    plan = ALONE if memory is None else memory.to_start_with(min_rollout_gpus=1)
    desk = PlanDesk(plan, policy, config=CONFIG, memory=memory)
    options = {"total_steps": 40, "offpolicyness": 30.0, "max_concurrent": 40, **options}
    world = HybridWorld(replica_size=1, plans=desk, **options)
    desk.hybrids = world.hybrids
    world.boot()
    return world


def is_step_trained(event: object) -> bool:
    return isinstance(event, events.RankSaid) and isinstance(event.event, StepTrained)


def num_batches(world: RandomWorld) -> int:
    """That are there for the steps to come."""
    step = world.control.cycle.next_batch_step(now=world.now)
    return 0 if step is None else world.control.desk.num_batches(step - 1)


def obey_one(world: HybridWorld, rng) -> bool:
    names = [name for name, it in sorted(world.replicas.items()) if it.orders]
    if names:
        world.obey(rng.choice(names))
    return bool(names)


def until(world: HybridWorld, rng, condition, *, most: int = 20000) -> None:
    """Let things happen until it is so; when nothing is left to, time passes."""
    for _ in range(most):
        if condition():
            return
        is_obeyed = obey_one(world, rng)
        if not world.step(rng) and not is_obeyed:
            assert world.ended is None, world.ended
            world.now += TIMEOUT_S / 5
            world.post(events.Ticked())
    raise AssertionError("it never came to that")


def until_ahead(world: HybridWorld, rng, batches: int) -> None:
    """Let rollouts run ahead while a step goes on."""
    until(world, rng, lambda: bool(world.trained))
    world.is_held = is_step_trained
    until(world, rng, lambda: num_batches(world) >= batches)
    del world.is_held
