"""A world of several nodes for `Control`: what is on a node that is lost ends, and waits for it.

By node: 0 has vllm-0 and vllm-1; 1 has vllm-2 and two ranks; 2 has two ranks.
"""

from random import Random

import msgspec

from control_world import RandomWorld
from libra.config.model import ModelConfig
from libra.config.planning import PlannerConfig
from libra.config.run import RunConfig
from libra.config.training import TrainingConfig
from libra.ids import InstanceId, NodeRank, SlotId
from libra.planner.plan import InstancePlacement, Plan, TrainPlacement
from libra.planner.without_nodes import Terms, smaller_dp
from libra.pools.change_policy import policy_of
from libra.pools.ground import core_slots, server_slots
from libra_supervisor import events
from libra_supervisor.loop.node_desk import NodeDesk, NodePolicy
from libra_supervisor.loop.plan_desk import PlanDesk
from libra_supervisor.loop.presence import Presence

PATIENCE_S, FIRST_PATIENCE_S, RETRY_S, TIMEOUT_S = 30.0, 200.0, 100.0, 50.0


def instance(number, node, slot):
    return InstancePlacement(
        instance_id=InstanceId(f"vllm-{number}"), tp=1, slots=(SlotId(slot),), node=NodeRank(node)
    )


HOME = Plan(
    strategy="configured",
    train=TrainPlacement(
        tp=1, pp=1, cp=1, ep=1, dp=4,
        slots=tuple(map(SlotId, (1, 2, 0, 1))), nodes=tuple(map(NodeRank, (1, 1, 2, 2))),
    ),
    instances=(instance(0, 0, 0), instance(1, 0, 1), instance(2, 1, 0)),
)  # fmt: skip


class NodeWorld(RandomWorld):
    def __init__(
        self, *, home=HOME, min_rollout_gpus=1, total_steps=8, batch_size=4,
        patience_s=PATIENCE_S, waits=False, **options,
    ):  # fmt: skip
        """`waits`: as with `node_loss_policy: wait`."""
        self.followers = (NodeRank(1), NodeRank(2))
        self.presence = Presence(self.followers)
        self.there = {NodeRank(0)}
        self.gang_waits = True
        config = RunConfig(
            model=ModelConfig(model_path="m"),
            training=TrainingConfig(batch_size=batch_size, micro_batch_size=1),
        )
        plans = self.desk(home, config)
        super().__init__(
            total_steps=total_steps,
            save_interval=1,
            plans=plans,
            min_rollout_gpus=min_rollout_gpus,
            **options,
        )
        if waits:
            return
        self.control.nodes = NodeDesk(
            NodePolicy(
                home=home,
                terms=Terms(
                    min_rollout_gpus=min_rollout_gpus,
                    layouts=lambda train: smaller_dp(train, micro_batch_size=1),
                    why_not=plans.why_not,
                ),
                followers=self.followers,
                patience_s=patience_s,
                first_patience_s=FIRST_PATIENCE_S,
                retry_s=RETRY_S,
                micro_batch_size=1,
            ),
            now=0.0,
        )

    def desk(self, home, config):
        planner = msgspec.convert({"runtime_reconfigure_timeout_s": TIMEOUT_S}, PlannerConfig)
        policy = policy_of(planner, num_slots=8, num_slots_elsewhere=(8, 8))
        return PlanDesk(home, policy, config=config, presence=self.presence)

    def boot(self, nodes=(1, 2)):
        for instance_id in self._ids:
            self.start_process(instance_id)
        self.start_gang()
        for node in nodes:
            self.join(NodeRank(node))

    # Nodes

    def join(self, node):
        assert node not in self.there
        self.there.add(node)
        self.post(events.NodeJoined(node))
        for instance_id, placement in tuple(self.placed.items()):
            is_new = instance_id not in self.processes and instance_id not in self.retired
            if placement.node == node and self.ended is None and is_new:
                self.start_process(instance_id)
        self.start_gang_if_it_waits()

    def lose(self, node, why="its lease has ended", *, is_said_first=False):
        self.there.discard(node)
        if is_said_first:
            self.post(events.NodeLost(node, why))
        for instance_id, placement in tuple(self.placed.items()):
            if placement.node == node and self.ended is None:
                self._end_process(instance_id, is_asked_for=False)
        if self.uses(node) and not self.gang_waits and self.ended is None:
            self.lose_gang()
        if self.ended is None and not is_said_first:
            self.post(events.NodeLost(node, why))

    def uses(self, node):
        return node in {self.train.node_of_rank(k) for k in range(self.train.world_size)}

    def pass_time(self, seconds):
        self.now += seconds
        if self.ended is None:
            self.post(events.Ticked())

    # What a node that is not there keeps from happening

    def start_process(self, instance_id, *arguments):
        placement = self.placed.get(instance_id)
        if placement is None or placement.node in self.there:
            super().start_process(instance_id, *arguments)

    def lose_gang(self):
        self.pending = [it for it in self.pending if not isinstance(it, events.GangReady)]
        super().lose_gang()

    def replace_for_reload(self, wanted, *, is_asked_for=True):
        placement = self.placed.get(wanted.instance_id)
        if placement is None or placement.node in self.there:
            super().replace_for_reload(wanted, is_asked_for=is_asked_for)
            return
        nonce, why = wanted.request.nonce, "its node is away"
        self.post(events.ReloadAnswered(wanted.instance_id, wanted.incarnation, nonce, None, why))

    def start_gang(self):
        self.gang_waits = True
        self.start_gang_if_it_waits()

    def start_gang_if_it_waits(self):
        missing = [it for it in self.followers if it not in self.there and self.uses(it)]
        if self.gang_waits and not missing and self.ended is None:
            self.gang_waits = False
            super().start_gang()

    def _check_slots(self):
        used = [*core_slots(self.train)]
        used += [slot for it in self.placed.values() for slot in server_slots(it)]
        assert len(used) == len(set(used)), "a slot has two owners"

    def run_out(self, rng: Random):
        """Let everything happen, and time pass when nothing does."""
        for _ in range(300):
            while self.step(rng):
                pass
            if self.ended is not None:
                return
            self.pass_time(PATIENCE_S)

    def until(self, rng, condition, *, waits=False):
        for _ in range(5000):
            if condition():
                return
            if not self.step(rng):
                assert waits, "nothing is left to happen"
                self.pass_time(PATIENCE_S / 4)
        raise AssertionError("it never came to that")

    @property
    def records(self):
        return [it.record for it in self.reconfigurations]

    @property
    def servers(self):
        return sorted(it.instance_id for it in self.control.plans.plan.instances)


def started(**options):
    world, rng = NodeWorld(**options), Random(1)
    world.boot()
    world.until(rng, lambda: len(world.trained) > 1)
    return world, rng


def lost(world, rng, node):
    """The node is lost, and the run has made of it what it does."""
    num_before = len(world.records)
    world.lose(node)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: len(world.records) > num_before)


def happens(world, rng, doing, count, node):
    """What a script of a test says, where it can: to `node`, or `count` times or seconds."""
    match doing:
        case "lose" if node in world.there:
            world.lose(node, is_said_first=rng.random() < 0.5)
        case "join" if node not in world.there:
            world.join(node)
        case "kill" if world.processes:
            world.kill_process(rng.choice(sorted(world.processes)))
        case "gang" if not world.gang_waits:
            world.lose_gang()
        case "time":
            world.pass_time(float(count))
        case "steps":
            for _ in range(count):
                world.step(rng)
