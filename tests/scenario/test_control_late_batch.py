"""What the control state does when a batch does not come together in time."""

from random import Random

import msgspec
import pytest

from control_parts import plan_of
from control_world import RandomWorld
from libra.config.model import ModelConfig
from libra.config.planning import PlannerConfig
from libra.config.run import RunConfig
from libra.config.training import TrainingConfig
from libra.ids import InstanceId, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement
from libra.pools.change_policy import policy_of
from libra.rollouts.evaluation import is_evaluated
from libra_supervisor import events
from libra_supervisor.loop.collection import CollectionTerms
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.loop.plan_desk import PlanDesk

TIMEOUT_S = 100.0


class StuckWorld(RandomWorld):
    """Sample 1 of every group of `stuck` never ends."""

    stuck = ()

    def is_held(self, event):
        group = getattr(event, "group", None)
        is_stuck = group is not None and event.index == 1 and not is_evaluated(event.group_id)
        return is_stuck and any(event.group_id.startswith(f"{name}/") for name in self.stuck)


def stuck_world(stuck, *, offpolicyness=0.0, plans=None, **terms):
    terms = CollectionTerms(**{"timeout_s": TIMEOUT_S, "max_retries": 1, **terms})
    # A batch is two groups of two; without staleness nothing is admitted beyond it.
    world = StuckWorld(total_steps=2, offpolicyness=offpolicyness, collection=terms, plans=plans)
    world.stuck = stuck
    world.boot()
    while world.step(Random(1)):
        pass
    assert world.control.cycle.phase is Phase.COLLECTING
    return world


def pass_time(world, seconds):
    world.now += seconds
    world.post(events.Ticked())


def test_a_retry_asks_again_for_what_is_missing_and_keeps_what_is_finished():
    world = stuck_world(("p0",))
    finished = world.control.desk.counts.accepted
    assert finished == 3
    pass_time(world, TIMEOUT_S - 1)
    assert world.asked_again == []
    pass_time(world, 1)
    [again] = world.asked_again
    assert (again.group_id, again.sample_indices) == ("p0/e0/a0", (1,))
    assert world.control.desk.counts.accepted == finished
    [said] = world.missing
    assert said.group_ids == ("p0/e0/a0",)
    assert said.fields["why"].startswith("1 of 2 groups are complete; waiting for p0/e0/a0 (sample")
    # The second try answers: the step is trained with all four trajectories.
    world.stuck = ()
    world.run(Random(2))
    assert [w.record.num_trajectories for w in world.written] == [4, 4]
    assert world.ended.exit_code == 0


def test_after_the_retries_the_run_ends_and_says_what_it_waited_for():
    world = stuck_world(("p0",))
    pass_time(world, TIMEOUT_S)
    pass_time(world, TIMEOUT_S)
    assert world.ended.exit_code == 4
    assert "the batch of step 1 did not come together within 2 x 100 s" in world.ended.reason
    assert "1 of 2 groups are complete; waiting for p0/e0/a0 (samples 1" in world.ended.reason


def test_where_a_reload_keeps_new_groups_back_the_servers_that_do_not_load_are_named():
    world = StuckWorld(
        total_steps=2,
        offpolicyness=0.0,
        collection=CollectionTerms(timeout_s=TIMEOUT_S, max_retries=1),
    )
    world.is_held = lambda event: isinstance(event, events.ReloadAnswered) and bool(world.trained)
    world.boot()
    while world.step(Random(1)):
        pass
    waiting = ", ".join(sorted(world.control.publication.waiting_for))
    assert waiting
    pass_time(world, TIMEOUT_S)
    [said] = world.missing
    end = f"no group is in progress, since v1 is not loaded by {waiting}"
    assert said.fields["why"] == f"0 of 2 groups are complete; {end}"


def test_where_it_is_allowed_the_step_is_trained_on_the_groups_that_are_there():
    world = stuck_world(("p0", "p2", "p3"), offpolicyness=1.0, allows_partial=True)
    pass_time(world, TIMEOUT_S)
    assert world.trained == []
    pass_time(world, TIMEOUT_S)
    assert [step for _, step, _ in world.trained] == [1]
    world.stuck = ()
    world.run(Random(2))
    assert [w.record.num_trajectories for w in world.written] == [2, 4]
    # The group that was late is a part of the next batch: nothing finished was thrown away.
    used = [t.trajectory_id for w in world.written for g in w.groups for t in g.trajectories]
    assert "p0/e0/a0/s0" in used
    assert len(used) == len(set(used))
    assert world.control.desk.counts.written_off == 2


def test_a_part_that_does_not_divide_over_the_ranks_is_not_trained_on():
    world = stuck_world(("p0",), allows_partial=True, micro_batch_size=4)
    pass_time(world, TIMEOUT_S)
    pass_time(world, TIMEOUT_S)
    assert world.ended.exit_code == 4
    assert "not even a part of the batch" in world.ended.reason


def test_a_part_has_to_divide_over_the_core_and_need_not_over_its_replicas():
    world = stuck_world(("p0",), allows_partial=True)
    plans = world.control.plans
    # Two ranks and a replica: shards of a replica may be smaller, those of the core may not.
    plans.plan = msgspec.structs.replace(
        plans.plan,
        train=msgspec.structs.replace(plans.plan.train, dp=2, slots=(SlotId(2), SlotId(3))),
        hybrids=(HybridPlacement(replica_id=ReplicaId("hybrid-0"), slots=(SlotId(4),)),),
    )
    pass_time(world, TIMEOUT_S)
    pass_time(world, TIMEOUT_S)
    assert world.ended is None
    assert [step for _, step, _ in world.trained] == [1]
    assert world.control.desk.counts.written_off == 2


@pytest.mark.parametrize("allows_partial", [False, True])
def test_without_any_complete_group_the_run_ends(allows_partial):
    world = stuck_world(("p0", "p1"), allows_partial=allows_partial)
    pass_time(world, TIMEOUT_S)
    pass_time(world, TIMEOUT_S)
    assert world.ended.exit_code == 4
    assert "0 of 2 groups are complete" in world.ended.reason


def test_a_sample_younger_than_the_limit_is_left_alone():
    world = stuck_world(("p0",))
    world.now += TIMEOUT_S - 1
    # It fails late: its group is tried again, with samples that have just begun.
    failed = events.SampleGaveUp("p0/e0/a0", 1, events.SampleFailed("engine", "reset"))
    world.post(failed)
    while world.step(Random(1)):
        pass
    pass_time(world, 1)
    assert len(world.missing) == 1
    assert world.asked_again == []


def test_while_servers_come_and_go_the_clock_stands_too():
    options = {"runtime_dynamic_reconfiguration_enabled": True}
    policy = policy_of(msgspec.convert(options, PlannerConfig), num_slots=3)
    before = plan_of([InstanceId("vllm-0"), InstanceId("vllm-1")])
    config = RunConfig(
        model=ModelConfig(model_path="m"),
        training=TrainingConfig(batch_size=4, micro_batch_size=1),
    )
    world = stuck_world(("p0",), plans=PlanDesk(before, policy, config=config))
    less = msgspec.structs.replace(before, instances=before.instances[:1])
    world.post(events.ReconfigurationWanted(1, less, "test"))
    assert not world.control.cycle.is_hold_wanted
    # The drain is not over yet.
    pass_time(world, TIMEOUT_S)
    assert world.missing == []
    while world.step(Random(1)):
        pass
    assert world.reconfigurations[0].record.outcome == "done"
    pass_time(world, TIMEOUT_S)
    assert len(world.asked_again) == 1


def test_while_the_trainer_is_held_for_a_change_of_the_plan_the_clock_stands():
    world = stuck_world(("p0",))
    world.control.cycle.hold()
    for _ in range(5):
        pass_time(world, TIMEOUT_S)
    assert world.missing == []
    world.control.cycle.release()
    pass_time(world, TIMEOUT_S - 1)
    assert world.missing == []
    pass_time(world, 1)
    assert len(world.asked_again) == 1
