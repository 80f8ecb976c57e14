"""What single decisions about a lost or returned node rest on."""

from random import Random

import msgspec
import pytest

from libra.ids import InstanceId, NodeRank, SlotId
from libra.planner.plan import TrainPlacement
from libra.wire.rank import RecomputeProbed
from libra_supervisor import events
from libra_supervisor.loop import commands
from libra_supervisor.loop.cycle import Phase
from node_world import (
    FIRST_PATIENCE_S,
    HOME,
    PATIENCE_S,
    TIMEOUT_S,
    NodeWorld,
    instance,
    lost,
    started,
)

ONE, TWO = NodeRank(1), NodeRank(2)
ON_TWO = TrainPlacement(tp=1, pp=1, cp=1, ep=1, dp=2, slots=(SlotId(0), SlotId(1)), node=TWO)
pytestmark = pytest.mark.timeout(120)


class NotingWorld(NodeWorld):
    """Notes how servers were drained, and which were told to end."""

    def __init__(self, **options):
        self.drains, self.retirements = [], []
        super().__init__(**options)

    def _carry_out(self, command):
        if isinstance(command, commands.DrainInstance):
            self.drains.append((command.instance_id, command.gives_back))
        if isinstance(command, commands.RetireInstance):
            self.retirements.append(command.instance_id)
        super()._carry_out(command)


def noting(**options):
    world, rng = NotingWorld(**options), Random(1)
    world.boot()
    world.until(rng, lambda: len(world.trained) > 1)
    return world, rng


def outcomes(world):
    return [(it.cause, it.outcome) for it in world.records]


def reshaping(world, rng):
    """Grow back until the ranks of the larger layout are being started."""
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.control.cycle.phase is Phase.RESHAPING)
    world.gang_waits = True
    world.pending = [it for it in world.pending if not isinstance(it, events.GangReady)]


def wanted_without(world, *names, plan):
    """An operator has servers leave the plan."""
    policy = world.control.plans.policy
    world.control.plans.policy = msgspec.structs.replace(policy, is_enabled=True)
    kept = tuple(it for it in plan.instances if it.instance_id not in names)
    world.post(
        events.ReconfigurationWanted(
            decision_id=1, reason="an operator", plan=msgspec.structs.replace(plan, instances=kept)
        )
    )


@pytest.mark.parametrize("held", [events.InstanceDrained, events.InstanceRetired])
def test_a_change_whose_way_back_is_gone_is_overtaken(held):
    home = msgspec.structs.replace(HOME, train=ON_TWO)
    world, rng = noting(home=home, total_steps=14)
    world.is_held = lambda event: isinstance(event, held)
    wanted_without(world, "vllm-2", plan=home)
    assert world.control.plans.change is not None, world.records
    if held is events.InstanceRetired:
        world.until(rng, lambda: world.retirements)
    num_drains = len(world.drains)
    world.lose(ONE)
    world.pass_time(PATIENCE_S)
    assert outcomes(world)[:1] == [("decision", "failed")]
    assert world.records[0].reason == "overtaken: node 1 (its lease has ended) left"
    # One whose end has begun is not drained once more.
    assert len(world.drains) - num_drains == (held is events.InstanceDrained)
    world.is_held = lambda event: False
    world.until(rng, lambda: len(world.records) == 2)
    assert outcomes(world)[1:] == [("node_lost", "done")]
    assert world.servers == ["vllm-0", "vllm-1"]
    world.join(ONE)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.control.plans.plan == home)
    world.run(rng)
    assert world.ended.exit_code == 0


def test_a_stop_while_the_ranks_are_away_still_lets_them_come_up_where_there_is_room():
    world, rng = started(total_steps=40)
    lost(world, rng, TWO)
    world.join(TWO)
    reshaping(world, rng)
    world.post(events.StopRequested("an operator", now=False))
    world.lose(TWO)
    world.pass_time(PATIENCE_S)
    world.run_out(rng)
    assert world.ended is not None, "it waits for a node that may never come back"
    assert world.ended.exit_code == 0
    assert outcomes(world) == [("node_lost", "done"), ("node_back", "failed")]
    assert world.train.dp == 2


def test_ranks_that_were_on_their_way_up_on_a_lost_node_come_up_there_when_it_is_back_first():
    world, rng = started(total_steps=14)
    lost(world, rng, TWO)
    world.join(TWO)
    reshaping(world, rng)
    # Without both, a server has to give its slot, which takes a while.
    world.is_held = lambda event: isinstance(event, events.InstanceDrained)
    world.lose(TWO)
    world.lose(ONE)
    world.pass_time(PATIENCE_S)
    assert world.control.plans.change.order.cause == "node_lost"
    # One change sees to it, however often it is looked at.
    num_records = len(world.records)
    world.pass_time(1)
    assert len(world.records) == num_records
    world.join(ONE)
    world.join(TWO)
    world.until(rng, lambda: world.control.cycle.phase is not Phase.RESHAPING)
    ground = world.control.plans.change.ground
    assert (ground.train, ground.reshaping) == (HOME.train, None)
    assert world.train == HOME.train
    world.is_held = lambda event: False
    world.until(rng, lambda: world.control.plans.change is None)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.control.plans.plan == HOME)
    world.run(rng)
    assert world.ended.exit_code == 0
    assert {step for _, step, _ in world.trained} == set(range(1, 15))


def test_what_was_missing_is_forgotten_when_it_is_there_and_said_again_when_it_is_not():
    train = msgspec.structs.replace(HOME.train, tp=2, dp=2)
    home = msgspec.structs.replace(HOME, train=train, instances=HOME.instances[:1])
    world, rng = started(home=home, total_steps=14)

    def num_said():
        return sum(it.event == "nodes_waited_for" for it in world.said)

    world.lose(ONE)
    world.lose(TWO)
    world.pass_time(PATIENCE_S)
    assert num_said() == 1
    assert world.control.nodes.note(TWO).startswith("the run waits for it: ")
    world.join(ONE)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.records)
    assert world.records[0].plan.train.node == ONE
    assert world.control.nodes.note(TWO) == "the run goes on without it"
    world.lose(ONE)
    world.pass_time(PATIENCE_S)
    assert num_said() == 2
    assert world.control.nodes.note(ONE).startswith("the run waits for it: ")
    world.join(ONE)
    world.join(TWO)
    world.run_out(rng)
    assert world.ended.exit_code == 0


def test_servers_that_were_given_up_do_not_count_among_those_that_are_left():
    world, _ = started(min_rollout_gpus=2)
    gone = InstanceId("vllm-1")
    world._end_process(gone, is_asked_for=False)
    world.post(events.ChildGaveUp("vllm-1", "5 restarts", "it crashes", 5, (), world.now))
    assert world.ended is None
    world.lose(ONE)
    world.pass_time(PATIENCE_S)
    assert world.ended.exit_code == 4
    assert "vllm-2 went with node 1" in world.ended.reason
    assert "1 rollout GPUs are left, min_rollout_gpus is 2" in world.ended.reason


def test_servers_that_sleep_do_not_count_among_those_that_are_left():
    world, _ = started(min_rollout_gpus=2)
    assert world.control.pool.on_asleep(InstanceId("vllm-1"), now=world.now)
    world.lose(ONE)
    world.pass_time(PATIENCE_S)
    assert world.ended.exit_code == 4
    assert "1 rollout GPUs are left, min_rollout_gpus is 2" in world.ended.reason


def stop_with_a_stuck_disk(world, rng, *, meanwhile):
    """Ends the run by its last checkpoint; `meanwhile` happens while that is written."""
    world.is_disk_stuck = True
    while world.step(rng):
        pass
    world.post(events.StopRequested("an operator", now=False))
    meanwhile()
    world.pass_time(PATIENCE_S)
    assert world.ended is None, "it is being saved"
    assert world.control.plans.change is None
    world.is_disk_stuck = False
    world.run(rng)
    assert world.ended.exit_code == 0


def test_the_loss_of_a_node_while_the_last_checkpoint_is_written_changes_nothing():
    world, rng = started(home=msgspec.structs.replace(HOME, train=ON_TWO), total_steps=14)
    stop_with_a_stuck_disk(world, rng, meanwhile=lambda: world.lose(ONE))
    assert not world.records


def test_nor_does_the_return_of_one():
    world, rng = started(total_steps=14)
    lost(world, rng, TWO)
    stop_with_a_stuck_disk(world, rng, meanwhile=lambda: world.join(TWO))
    assert len(world.records) == 1


def test_ranks_that_came_up_on_a_node_which_is_lost_again_are_done_without_once_more():
    world, rng = started(total_steps=14)
    lost(world, rng, TWO)
    world.join(TWO)
    reshaping(world, rng)
    world.is_held = lambda event: isinstance(event, events.InstanceDrained)
    world.lose(TWO)
    world.lose(ONE)
    world.pass_time(PATIENCE_S)
    world.join(ONE)
    world.join(TWO)
    world.until(rng, lambda: world.control.cycle.phase is not Phase.RESHAPING)
    assert world.train == HOME.train
    world.lose(TWO)
    world.pass_time(PATIENCE_S)
    assert outcomes(world)[-1] == ("node_lost", "failed"), "it goes on with what is gone"
    assert world.control.plans.change.order.wanted.train.node == 0
    world.is_held = lambda event: False
    world.run_out(rng)
    assert world.ended.exit_code == 0


def test_the_layout_that_the_run_began_with_is_not_probed_when_a_loss_moves_it():
    train = msgspec.structs.replace(ON_TWO, tp=2, dp=1)
    servers = (instance(0, 0, 0), instance(1, 1, 0), instance(2, 1, 1))
    home = msgspec.structs.replace(HOME, train=train, instances=servers)
    world, rng = NodeWorld(home=home, num_probes=2, total_steps=14), Random(1)
    world.boot()
    for rank in range(2):
        probed = RecomputeProbed(rank=rank, before_bytes=1, peak_bytes=2, error="")
        world.post(events.RankSaid(world.attempt, probed))
    world.post(events.ProbeJudged(world.attempt, "kept", "it fits"))
    world.until(rng, lambda: len(world.trained) > 1)
    lost(world, rng, TWO)
    moved = world.records[0].plan.train
    assert (moved.tp, moved.dp, moved.node) == (2, 1, ONE)
    num_trained = len(world.trained)
    world.until(rng, lambda: len(world.trained) > num_trained)
    world.run(rng)
    assert world.ended.exit_code == 0


def test_the_run_grows_back_only_once_a_version_is_served():
    world, rng = NodeWorld(total_steps=8), Random(1)
    world.boot(nodes=(1,))
    world.is_held = lambda event: isinstance(event, events.InstanceAnswered)
    while world.step(rng):
        pass
    world.pass_time(FIRST_PATIENCE_S)
    world.until(rng, lambda: world.records)
    assert world.control.publication.committed is None
    world.join(TWO)
    world.pass_time(PATIENCE_S)
    while world.step(rng):
        pass
    assert world.control.plans.change is None
    assert world.train.dp == 2
    world.is_held = lambda event: False
    world.until(rng, lambda: world.control.plans.plan == HOME)
    world.run(rng)
    assert world.ended.exit_code == 0


def test_ranks_that_fail_once_on_what_is_left_are_started_there_again():
    world, rng = started(total_steps=14)
    attempt = world.attempt
    world.lose(TWO)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.attempt > attempt)
    world.lose_gang()
    world.until(rng, lambda: world.records)
    assert outcomes(world) == [("node_lost", "done")]
    assert world.records[0].plan.train.dp == 2
    world.run(rng)
    assert world.ended.exit_code == 0


def test_ranks_on_what_is_left_may_take_their_time():
    world, rng = started(total_steps=14)
    world.is_held = lambda event: isinstance(event, events.GangReady)
    world.lose(TWO)
    world.pass_time(PATIENCE_S)
    for _ in range(5):
        while world.step(rng):
            pass
        world.pass_time(TIMEOUT_S + 1)
    assert not world.records
    world.is_held = lambda event: False
    world.until(rng, lambda: world.records)
    assert outcomes(world) == [("node_lost", "done")]
    world.run(rng)
    assert world.ended.exit_code == 0


def test_the_way_back_says_what_it_comes_from():
    world, rng = started(total_steps=30)
    assert not world.control.nodes.has_lost
    lost(world, rng, ONE)
    assert world.control.nodes.has_lost
    world.join(ONE)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.control.plans.plan == HOME)
    assert {it.reason for it in world.records[1:]} == {"nodes are back"}
    world.pass_time(1)
    # What is missing from here on is missing for another reason.
    assert not world.control.nodes.has_lost


def test_a_server_that_gives_its_slot_to_the_core_waits_for_no_answers():
    home = msgspec.structs.replace(HOME, train=ON_TWO)
    world, rng = noting(home=home, total_steps=14)
    lost(world, rng, TWO)
    assert world.drains == [("vllm-2", True)]
    assert world.records[0].stopped == ("vllm-2",)
