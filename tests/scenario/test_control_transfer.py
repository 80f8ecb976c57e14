"""Weights by transfer: who receives when, and what a lost member does to the others."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_parts import plan_of
from control_runs import A, B, run_until, run_until_stuck
from libra.config.model import ModelConfig
from libra.config.planning import PlannerConfig
from libra.config.run import RunConfig
from libra.config.training import TrainingConfig
from libra.ids import InstanceId, SlotId
from libra.pools.change_policy import policy_of
from libra.pools.member import MemberState
from libra.wire.rank import AcksJudged, WeightsOffered, WeightsSent
from libra_supervisor import events
from libra_supervisor.loop import commands
from libra_supervisor.loop.cycle import Phase
from libra_supervisor.loop.plan_desk import PlanDesk
from transfer_world import Receive, TransferWorld


def started(**knobs) -> TransferWorld:
    world = TransferWorld(**knobs)
    world.boot()
    return world


def run_to_the_end(world: TransferWorld, rng: Random) -> None:
    world.run(rng)
    assert world.ended is not None, world.control.cycle.phase
    assert world.ended.exit_code == 0, world.ended.reason


def groups(world: TransferWorld) -> list[tuple[str, dict[InstanceId, int]]]:
    return [(it.transfer.group_id, it.transfer.rank_offset_of) for it in world.transferred]


def is_receiving(world: TransferWorld) -> bool:
    """Both are in a transfer of a trained version, and neither is through."""
    sending = world.sending
    if sending is None or sending.command.policy_version == 0:
        return False
    return sending.arrived == {A, B} and not sending.received


def test_one_group_serves_every_version_while_its_processes_live():
    world = started(total_steps=4)
    run_to_the_end(world, Random(1))
    assert [it.policy_version for it in world.transferred] == [0, 1, 2, 3, 4]
    assert len({name for name, _ in groups(world)}) == 1
    assert groups(world)[0][1] == {A: 1, B: 2}


def test_the_trainer_holds_a_version_until_it_is_committed():
    rng = Random(2)
    world = started(total_steps=3, offpolicyness=2.0)
    world.is_held = lambda event: (
        isinstance(event, events.RankSaid) and isinstance(event.event, WeightsOffered)
    )
    run_until_stuck(world, rng)
    world.is_held = lambda event: isinstance(event, events.ReloadAnswered)
    run_until_stuck(world, rng)
    # Everything is sent, but nobody has proved it: the weights may be needed once more.
    assert world.sending is None
    assert world.control.cycle.phase is Phase.EXPORTING
    assert world.trained == []
    world.is_held = lambda _: False
    run_to_the_end(world, rng)


def test_a_server_lost_in_a_transfer_costs_the_others_neither_process_nor_version():
    rng = Random(3)
    world = started(total_steps=3)
    run_until(world, rng, is_receiving)
    version, born = world.sending.command.policy_version, world.num_births_of[B]
    first_group = world.sending.command.transfer.group_id
    world.is_held = lambda event: isinstance(event, events.ChildReady)
    world.kill_process(A)
    assert "its process was lost" in world.sending.why_aborted
    run_until(world, rng, lambda w: w.routes.get(B) == version)
    retried = world.transferred[-1]
    assert retried.policy_version == version
    assert retried.transfer.group_id != first_group
    # Without waiting for the replacement.
    assert retried.transfer.rank_offset_of == {B: 1}
    world.is_held = lambda _: False
    run_to_the_end(world, rng)
    assert world.num_births_of[B] == born
    assert world.attempt == 1, "training was touched"


def test_who_fails_by_itself_waits_until_the_others_have_proved_the_version():
    rng = Random(4)
    world = started(total_steps=3)
    run_until(world, rng, is_receiving)
    version = world.sending.command.policy_version
    world.loads_to_fail.append(A)
    world.is_held = lambda event: (
        isinstance(event, Receive)
        and event.instance_id == B
        and world.sending is not None
        and not world.sending.why_aborted
        and A in world.loads_to_fail
    )
    run_until(world, rng, lambda w: w.routes.get(B) == version)
    assert world.transferred[-1].transfer.rank_offset_of == {B: 1}
    run_to_the_end(world, rng)
    assert world.num_births_of == {A: 1, B: 1}, "a transfer that failed once costs no process"


@pytest.mark.parametrize("seed", range(8))
def test_ranks_started_anew_offer_the_served_version_again_when_nobody_has_it(seed):
    options = {
        "runtime_dynamic_reconfiguration_enabled": True,
        "runtime_reconfigure_training": True,
    }
    policy = policy_of(msgspec.convert(options, PlannerConfig), num_slots=4)
    training = TrainingConfig(batch_size=4, micro_batch_size=1)
    config = RunConfig(model=ModelConfig(model_path="m"), training=training)
    rng, before = Random(seed), plan_of([A, B])
    world = started(plans=PlanDesk(before, policy, config=config), total_steps=6)
    run_until(world, rng, lambda w: w.trained)
    core = msgspec.structs.replace(before.train, dp=2, slots=(SlotId(2), SlotId(3)))
    wanted = msgspec.structs.replace(before, train=core)
    world.post(events.ReconfigurationWanted(1, wanted, "test"))
    # No answer comes: there is nothing to train on, and so no next version, when servers are lost.
    world.is_held = lambda event: hasattr(event, "group")
    run_until_stuck(world, rng)
    assert world.reconfigurations[0].record.outcome == "done"
    assert world.control.cycle.phase is Phase.COLLECTING
    for instance_id in list(world.processes):
        world.kill_process(instance_id)
    world.is_held = lambda _: False
    run_to_the_end(world, rng)
    assert world.attempt == 2


def test_the_next_try_waits_for_rank_0_since_it_may_be_the_one_that_is_gone():
    rng = Random(5)
    world = started(total_steps=3)
    run_until(world, rng, is_receiving)
    num_sent = len(world.transferred)
    # Rank 0 is dead, and the servers notice it before the gang does.
    world._break("connection lost")
    world.is_held = lambda event: (
        isinstance(event, events.RankSaid) and isinstance(event.event, WeightsSent)
    )
    run_until(world, rng, lambda w: len(w.control.pool.ids_in(MemberState.STALE)) == 2)
    run_until_stuck(world, rng)
    assert len(world.transferred) == num_sent
    world.is_held = lambda _: False
    world.lose_gang()
    run_to_the_end(world, rng)
    assert world.num_births_of == {A: 1, B: 1}


def test_a_late_server_receives_what_is_served_while_the_ranks_still_hold_it():
    rng = Random(6)
    world = started(total_steps=8, offpolicyness=2.0)
    run_until(world, rng, lambda w: w.trained)
    # No answers, so that no further batch is taken.
    world.is_held = lambda event: hasattr(event, "group")
    run_until_stuck(world, rng)
    assert world.control.cycle.phase is Phase.COLLECTING
    world.kill_process(A)
    run_until(world, rng, lambda w: A in w.routes)
    late = world.transferred[-1]
    assert late.transfer.rank_offset_of == {A: 1}
    assert late.policy_version == world.control.publication.committed
    assert world.reloads[-1].record.is_catch_up
    world.is_held = lambda _: False
    run_to_the_end(world, rng)


def test_a_late_servers_checksum_is_judged_by_rank_0_which_alone_knows_the_right_one():
    rng = Random(6)
    world = started(total_steps=8, offpolicyness=2.0)
    run_until(world, rng, lambda w: w.trained)
    world.is_held = lambda event: hasattr(event, "group")
    run_until_stuck(world, rng)
    world.kill_process(A)
    run_until(world, rng, lambda w: any(_is_ack_of(e, A) for e in w.pending))
    said = next(e for e in world.pending if _is_ack_of(e, A))
    world.pending.remove(said)
    wrong = msgspec.structs.replace(said.ack, checksum="of other bytes")
    world.pending.append(msgspec.structs.replace(said, ack=wrong))
    num_reloads = len(world.reloads)
    run_until(world, rng, lambda w: len(w.reloads) > num_reloads)
    assert "checksum" in world.reloads[-1].record.refused[A]
    assert A not in world.routes
    world.is_held = lambda _: False
    run_to_the_end(world, rng)


def test_a_verdict_on_a_batch_that_was_given_up_says_nothing_about_the_next_one():
    rng = Random(6)
    world = started(total_steps=8, offpolicyness=2.0)
    run_until(world, rng, lambda w: w.trained)
    world.is_held = lambda event: hasattr(event, "group")
    run_until_stuck(world, rng)
    world.kill_process(A)
    run_until(world, rng, lambda w: any(_is_verdict(e) for e in w.pending))
    late = next(e for e in world.pending if _is_verdict(e))
    assert late.event.accepted == (A,)
    world.pending.remove(late)
    world.is_held = _is_verdict
    run_until(world, rng, lambda w: w.reloads[-1].record.outcome == "cancelled: a newer version")
    world.post(late)
    for instance_id in (A, B):
        world.suspect_process(instance_id)
    record = world.reloads[-1].record
    assert record.outcome.startswith("failed")
    assert record.policy_version > late.event.policy_version
    assert (record.accepted, record.slowest_instance) == ((), None)


def test_a_server_that_the_operator_restarts_meanwhile_is_not_waited_for():
    rng = Random(13)
    world = started(total_steps=3)
    run_until(world, rng, is_receiving)
    world.post(events.RestartRequested(A))
    assert world.sending.why_aborted == "vllm-0: it is leaving"
    run_to_the_end(world, rng)
    assert world.num_births_of == {A: 2, B: 1}


def test_a_late_server_waits_for_the_next_version_when_the_ranks_have_gone_on():
    rng = Random(7)
    world = started(total_steps=6, sync_interval=3, offpolicyness=4.0)
    run_until(world, rng, lambda w: w.control.cycle.step == 1)
    world.kill_process(A)
    run_until(world, rng, lambda w: A in w.routes)
    assert world.routes[A] == 3
    assert {it.policy_version for it in world.transferred} == {0, 3}
    run_to_the_end(world, rng)


def test_when_nobody_serves_any_more_the_ranks_publish_what_they_hold():
    rng = Random(8)
    world = started(total_steps=6, sync_interval=3, offpolicyness=2.0, num_instances=1)
    run_until(
        world,
        rng,
        lambda w: w.control.cycle.step == 1 and w.control.cycle.phase is Phase.COLLECTING,
    )
    # Else the batch might be full already, and nothing would be wanted of the server.
    assert world.control.desk.num_complete < 2
    world.kill_process(A)
    run_to_the_end(world, rng)
    assert [it.policy_version for it in world.transferred][:2] == [0, 1]
    assert [step for _, step, _ in world.trained] == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_that_nobody_can_finish_gives_way():
    rng = Random(9)
    world = started(total_steps=4, num_instances=1, eval_rows=3, offpolicyness=2.0)
    world.is_evaluation_stuck = True
    run_until(world, rng, lambda w: w.control.cycle.phase is Phase.EVALUATING)
    world.kill_process(A)
    run_until(world, rng, lambda w: w.control.publication.committed == 1)
    world.is_evaluation_stuck = False
    run_to_the_end(world, rng)


def test_a_reload_that_is_asked_for_is_refused_when_the_ranks_have_gone_on():
    rng = Random(10)
    world = started(total_steps=6, sync_interval=3, offpolicyness=2.0)
    run_until(world, rng, lambda w: w.control.cycle.step == 1)
    world.post(events.ReloadRequested())
    refused = [it for it in world.said if it.event == "reload_refused"]
    assert "do not hold the served version" in refused[0].fields["why"]


def test_weights_that_are_not_finite_end_the_run_before_anybody_is_asked():
    rng = Random(11)
    world = started()
    run_until(world, rng, lambda w: any(_is_offer(e) for e in w.pending))
    said = next(e for e in world.pending if _is_offer(e))
    world.pending.remove(said)
    broken = msgspec.structs.replace(said.event, error="a value is NaN or infinite")
    world.post(events.RankSaid(said.attempt, broken))
    assert world.ended == commands.EndRun(
        4, "the trainer's weights v0 are broken: a value is NaN or infinite"
    )
    assert world.transferred == []


def test_a_checksum_that_is_not_the_senders_is_refused():
    rng = Random(12)
    world = started(total_steps=3)
    run_until(world, rng, lambda w: any(_is_ack_of(e, A) for e in w.pending))
    said = next(e for e in world.pending if _is_ack_of(e, A))
    world.pending.remove(said)
    wrong = msgspec.structs.replace(said.ack, checksum="of other bytes")
    world.pending.append(msgspec.structs.replace(said, ack=wrong))
    run_until(world, rng, lambda w: w.reloads)
    record = world.reloads[0].record
    assert record.accepted == (B,)
    assert "checksum 'of other bytes', sent was" in record.refused[A]
    run_to_the_end(world, rng)
    assert world.num_births_of[A] == 2, "who holds other weights is not asked again"


def _is_offer(event) -> bool:
    return isinstance(event, events.RankSaid) and isinstance(event.event, WeightsOffered)


def _is_verdict(event) -> bool:
    return isinstance(event, events.RankSaid) and isinstance(event.event, AcksJudged)


def _is_ack_of(event, instance_id: InstanceId) -> bool:
    return isinstance(event, events.ReloadAnswered) and event.instance_id == instance_id


FAULTS = st.tuples(
    st.integers(1, 120),
    st.sampled_from(["kill", "kill", "gang", "load", "hang", "restart", "reload", "drain"]),
    st.integers(0, 2),
)


@pytest.mark.case("R-B24")
@given(
    seed=st.integers(0, 2**32),
    faults=st.lists(FAULTS, max_size=4),
    sync=st.integers(1, 3),
    num_instances=st.integers(1, 3),
    eval_rows=st.sampled_from([0, 2]),
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_lost_when_the_run_goes_on(seed, faults, sync, num_instances, eval_rows):
    rng = Random(seed)
    world = started(
        total_steps=4,
        sync_interval=sync,
        offpolicyness=sync,
        save_interval=2,
        num_instances=num_instances,
        eval_rows=eval_rows,
    )
    for wait, fault, k in faults:
        for _ in range(wait):
            if not world.step(rng):
                break
        if world.ended is not None:
            break
        strike(world, rng, fault, InstanceId(f"vllm-{k % num_instances}"))
    world.run(rng)
    assert world.ended is not None, world.control.cycle.phase
    if world.ended.exit_code == 4:
        # Every batch of three in a row lost a server, or was thrown back with the gang.
        assert len(faults) >= 3
        assert "3 batches in a row" in world.ended.reason
        return
    assert sorted({step for _, step, _ in world.trained}) == [1, 2, 3, 4]
    assert all(
        record.record.nonce.startswith(str(record.record.attempt)) for record in world.reloads
    )


def strike(world: TransferWorld, rng: Random, fault: str, instance_id: InstanceId) -> None:
    match fault:
        case "kill":
            world.kill_process(instance_id)
        case "gang":
            world.lose_gang()
        case "load":
            world.loads_to_fail.append(instance_id)
        case "hang" if instance_id in world.processes:
            world.suspect_process(instance_id)
            world.step(rng)
            world.kill_process(instance_id)
        case "restart":
            world.post(events.RestartRequested(instance_id))
        case "reload":
            world.post(events.ReloadRequested())
        case "drain":
            world.post(events.DrainRequested(instance_id, drain=True))
            world.step(rng)
            world.post(events.DrainRequested(instance_id, drain=False))
