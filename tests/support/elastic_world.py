"""A run whose plan is changed, in a world with faults: what its tests want of it."""

import msgspec

from control_parts import plan_of
from libra.config.model import ModelConfig
from libra.config.planning import PlannerConfig
from libra.config.run import RunConfig
from libra.config.training import TrainingConfig
from libra.ids import InstanceId, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, TrainPlacement
from libra.pools.change_policy import policy_of
from libra_supervisor import events
from libra_supervisor.loop.plan_desk import PlanDesk
from sleepy_world import SleepyWorld

IDS = [InstanceId("vllm-0"), InstanceId("vllm-1")]
TIMEOUT_S = 50.0
OPTIONS = {
    "runtime_dynamic_reconfiguration_enabled": True,
    "runtime_reconfigure_training": True,
    "runtime_cluster_swap_enabled": True,
    "runtime_reconfigure_timeout_s": TIMEOUT_S,
}


class Replicas:
    """A desk of replicas that does as it is told, some time later."""

    def __init__(self) -> None:
        self.world: SleepyWorld | None = None
        self.members: set[ReplicaId] = set()
        self.warm_ones: set[ReplicaId] = set()
        self.joins = True
        self.present = ()

    def warm(self, placement):
        self.warm_ones.add(placement.replica_id)
        self.world.pending.append(events.HybridWarmed(placement.replica_id))
        return ()

    def attach(self, placement):
        self.warm_ones.discard(placement.replica_id)
        self.members.add(placement.replica_id)
        if self.joins:
            self.world.pending.append(events.HybridJoined(placement.replica_id))
        return ()

    def detach(self, replica_id):
        self.warm_ones.discard(replica_id)
        self.members.discard(replica_id)
        self.world.pending.append(events.HybridLeft(replica_id))
        return ()


def elastic(*, total_steps=6, method="inplace", **options) -> SleepyWorld:
    planner = msgspec.convert({**OPTIONS, **options}, PlannerConfig)
    config = RunConfig(
        model=ModelConfig(model_path="m"),
        training=TrainingConfig(batch_size=4, micro_batch_size=1),
        global_resource_planner=planner,
    )
    replicas = Replicas()
    desk = PlanDesk(plan_of(IDS), policy_of(planner, num_slots=6), config=config, hybrids=replicas)
    world = SleepyWorld(total_steps=total_steps, save_interval=1, plans=desk, reload_method=method)
    replicas.world = world
    world.replicas = replicas
    world.boot()
    return world


def plan(train_slots, instance_slots, hybrid_slots=()) -> Plan:
    return Plan(
        strategy="grp",
        train=TrainPlacement(
            tp=1, pp=1, cp=1, ep=1, dp=len(train_slots), slots=tuple(map(SlotId, train_slots))
        ),
        instances=tuple(
            InstancePlacement(instance_id=InstanceId(f"x-{s}"), tp=1, slots=(SlotId(s),))
            for s in instance_slots
        ),
        hybrids=tuple(
            HybridPlacement(replica_id=ReplicaId(f"h-{s}"), slots=(SlotId(s),))
            for s in hybrid_slots
        ),
    )


def want(world, wanted, decision_id=1):
    world.post(events.ReconfigurationWanted(decision_id, wanted, "test"))


def records(world):
    return [it.record for it in world.reconfigurations]


def spent_on(record):
    """What children did, by name; never longer than the change took."""
    assert all(0 < sum(it.values()) <= record.total_s + 1e-9 for it in record.stages.values())
    return {child: sorted(stages) for child, stages in sorted(record.stages.items())}


def a_step_is_trained(world):
    return len(world.trained) > 0


def run_out(world, rng):
    """Let everything happen, and time pass when nothing does."""
    for _ in range(200):
        while world.step(rng):
            pass
        if world.ended is not None:
            return
        world.now += TIMEOUT_S
        world.post(events.Ticked())


def strike(world, rng, fault):
    if fault == "gang":
        world.lose_gang()
    elif fault == "wait":
        world.now += TIMEOUT_S
        world.post(events.Ticked())
    elif fault == "sleep":
        world.sleepless += sorted(world.processes)
    elif world.processes:
        instance_id = rng.choice(sorted(world.processes))
        if fault == "hang" and instance_id not in world.asleep:
            world.suspect_process(instance_id)
        world.kill_process(instance_id)


def resumed(world, memory) -> SleepyWorld:
    """The same run under another supervisor, which knows what the first one kept."""
    replicas = Replicas()
    desk = PlanDesk(
        memory.to_start_with(min_rollout_gpus=1),
        world.control.plans.policy,
        config=RunConfig(model=ModelConfig(model_path="m")),
        memory=memory,
        hybrids=replicas,
    )
    second = replicas.world = SleepyWorld(total_steps=3, plans=desk)
    second.replicas = replicas
    second.boot()
    return second
