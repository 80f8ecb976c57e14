"""The desk at which a running plan is looked at, on the real Replanner and the real plan desk."""

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import anyio
import numpy as np
import pytest
from msgspec.structs import replace

from libra import clock
from libra.config.rollout import TpBucket
from libra.ids import InstanceId, NodeRank, ReplicaId, SlotId
from libra.planner.calibration import book_of
from libra.planner.cost_models import described
from libra.planner.demand import observed_demand
from libra.planner.plan import HybridPlacement, InstancePlacement
from libra.planner.replan import Replanner
from libra.planner.search import plan as searched
from libra.pools.change_policy import policy_of
from libra.pools.pool import RolloutPool
from libra.wire.api import PlanOrder
from libra_supervisor.app.replan_desk import DeskPorts, ReplanDesk
from libra_supervisor.events import ReconfigurationEnded, ReconfigurationWanted
from libra_supervisor.loop.commands import WriteStep
from libra_supervisor.loop.plan_desk import PlanDesk
from libra_supervisor.records.step import StepRecord
from planner_cases import MEASURED_1_8B, QWEN2_5_7B
from replan_world import Load, replan_config

READS = Load(mean=400, sigma=0.6, prompt=12000)
WRITES = Load(mean=4000, sigma=1.0, prompt=256)
ON = {
    "runtime_reconfigure_training": True,
    "runtime_cluster_swap_enabled": True,
    "runtime_replan_interval_steps": 4,
}


@dataclass
class FakeControl:
    """What the desk reads of the control state."""

    plans: PlanDesk
    pool: RolloutPool
    committed: int | None = 1
    progress: object = None
    """Of an evaluation."""

    stop_reason: str | None = None

    @property
    def publication(self):
        return self

    @property
    def cycle(self):
        return self

    @property
    def evaluator(self):
        return self


@dataclass
class Bench:
    """A desk, what it wrote and posted, and steps for it."""

    config: object
    control: FakeControl
    desk: ReplanDesk = None
    written: list = field(default_factory=list)
    posted: list = field(default_factory=list)
    step: int = 0

    def end_step(self, load, *, step_s=150.0):
        self.step += 1
        rng = np.random.default_rng(self.step)
        finished = load.lengths(rng, 240, 16384)
        self.desk.on_command(WriteStep(step_record(self.step, step_s), (), tuple(finished)))

    async def end_steps(self, load, num):
        for _ in range(num):
            self.end_step(load)
            await anyio.wait_all_tasks_blocked()


def step_record(step, step_s):
    numbers = dict.fromkeys(StepRecord.__struct_fields__, 0)
    return StepRecord(
        **numbers
        | {
            "step": step,
            "step_s": step_s,
            "rollout_s": step_s,
            "num_dropped": {},
            "train_predicted_s": None,
        }
    )


@asynccontextmanager
async def bench(
    *,
    planned_for=READS,
    last_decision_id=0,
    max_run_s=None,
    instances_of_one=False,
    lead_steps=0.0,
    arch=QWEN2_5_7B,
    **planner,
):
    config = replan_config(arch=arch, **{**ON, **planner})
    config = replace(config, control=replace(config.control, total_steps=500, max_run_s=max_run_s))
    lengths = planned_for.lengths(np.random.default_rng(0), 2400, 16384)
    plan = searched(config, demand=observed_demand(config, lengths)).plan
    if instances_of_one:
        plan = replace(plan, instances=tuple(of_one(plan)))
    policy = policy_of(config.global_resource_planner, num_slots=8)
    pool = RolloutPool([(it.instance_id, it.tp) for it in plan.instances], now=0.0)
    control = FakeControl(PlanDesk(plan, policy, config=config), pool)
    made = Bench(config, control)
    book = book_of(*described(config))

    async def post(event):
        made.posted.append((event, len(made.written)))

    made.desk = ReplanDesk(
        config,
        Replanner(config, num_gpus=8, book=book),
        DeskPorts(
            control=control,
            book=lambda: book,
            instances=tuple,
            write=made.written.append,
            post=post,
            gpus_per_node=8,
            lead_steps=lambda: lead_steps,
        ),
        last_decision_id=last_decision_id,
        started_at=clock.now(),
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.desk.run)
        yield made
        tasks.cancel_scope.cancel()


def of_one(plan):
    """Instances of TP 1 on the slots of those of `plan`."""
    slots = [slot for it in plan.instances for slot in it.slots]
    for number, slot in enumerate(slots):
        yield InstancePlacement(instance_id=InstanceId(f"vllm-{number}"), tp=1, slots=(slot,))


async def settled(made, num_written):
    for _ in range(3000):
        if len(made.written) >= num_written:
            break
        await clock.sleep(0.01)
    await anyio.wait_all_tasks_blocked()
    assert len(made.written) >= num_written


@pytest.fixture
def anyio_backend():
    return "asyncio"


pytestmark = pytest.mark.anyio


async def until_wanted(made, load=WRITES):
    """Steps of a load that the plan was not made for, until another plan is wanted."""
    with anyio.fail_after(60):
        while not made.posted:
            made.end_step(load)
            await clock.sleep(0.05)
    return made.posted[0][0]


async def test_a_look_is_written_before_what_follows_from_it():
    async with bench(last_decision_id=6) as made:
        wanted = await until_wanted(made)
        _, num_written = made.posted[0]
        decided = made.written[num_written - 1]
        assert isinstance(wanted, ReconfigurationWanted)
        assert wanted.decision_id == decided.decision_id == 6 + num_written
        assert (decided.verdict, decided.is_dry_run) == ("switch", False)
        assert wanted.reason == decided.reason
        assert made.desk.last_in_words.startswith("switch decided after step ")


async def test_while_a_change_is_under_way_nothing_is_decided_but_a_dry_run_answered():
    async with bench() as made:
        await until_wanted(made)
        num_written = len(made.written)
        await made.end_steps(READS, 12)
        assert len(made.written) == num_written
        refused = await made.desk.ask(is_dry_run=False)
        assert (refused.ok, refused.message) == (False, "a change of the plan is under way")
        shown = await made.desk.ask(is_dry_run=True)
        assert shown.ok
        assert made.written[-1].is_dry_run
        assert len(made.posted) == 1


async def test_a_plan_is_looked_for_on_the_slots_that_are_not_lost():
    async with bench() as made:
        plans = made.control.plans
        gone, *kept = plans.plan.instances
        plans.plan = replace(plans.plan, instances=tuple(kept))
        plans.lost = frozenset((gone.node, slot) for slot in gone.slots)
        shown = await made.desk.ask(is_dry_run=True)
        assert "does not end" not in shown.message
        wanted = shown.details["plan_wanted"]
        assert wanted is not None
        used = {slot for it in wanted["instances"] for slot in it["slots"]}
        assert not used & set(gone.slots)


class BeganMeanwhile(PlanDesk):
    """Another change begins while the search asks what is possible."""

    def why_not(self, _wanted):
        self.change = object()
        return ""


async def test_a_change_that_began_during_the_search_makes_of_it_a_dry_run():
    async with bench() as made:
        old = made.control.plans
        made.control.plans = BeganMeanwhile(old.plan, old.policy, config=made.config)
        for _ in range(6):
            made.end_step(WRITES)
        reply = await made.desk.ask(is_dry_run=False)
        assert reply.details["verdict"] == "switch"
        assert reply.details["is_dry_run"]
        assert made.posted == []


async def test_how_changes_end_is_counted_and_the_desk_looks_again_after_the_cooldown():
    async with bench(runtime_replan_cooldown_s=0.001) as made:
        wanted = await until_wanted(made)
        made.desk.on_event(ReconfigurationEnded(99, "failed", 0.0, {}, "somebody else's"))
        assert (await made.desk.ask(is_dry_run=False)).ok is False
        ended = ReconfigurationEnded(wanted.decision_id, "done", 2.0, {"drain": 1.0}, "")
        made.desk.on_event(ended)
        assert made.desk.outcomes.num_ended == {"failed": 1, "done": 1}
        assert made.desk.outcomes.last_ended == ended
        made.control.plans.plan = wanted.plan
        num_written = len(made.written)
        await clock.sleep(0.01)
        await made.end_steps(WRITES, 8)
        await settled(made, num_written + 1)
        assert {it.verdict for it in made.written[num_written:]} == {"keep"}


async def test_after_a_server_came_back_by_itself_the_desk_waits_for_the_cooldown():
    async with bench(runtime_replan_cooldown_s=1000.0) as made:
        made.desk.on_event(ReconfigurationEnded(0, "done", 0.0, {}, "no batch", "starved"))
        await made.end_steps(WRITES, 12)
        assert made.written == []


LENDS = {
    "planned_for": WRITES,
    "lead_steps": 100.0,
    "arch": MEASURED_1_8B,
    "elastic_hybrid_min_rollout_gpus": 0,
    "runtime_switch_cost_prior_s": 0.001,
}


async def test_the_planner_lends_the_last_server_when_that_pays_most():
    async with bench(**LENDS) as made:
        made.control.plans.hybrids = SimpleNamespace(present=())
        await made.end_steps(READS, 8)
        await made.desk.ask(is_dry_run=False)
        wanted = made.posted[-1][0].plan
        assert wanted.instances == ()
        assert wanted.num_hybrid_gpus == made.control.plans.plan.num_rollout_gpus


async def test_the_last_server_is_no_candidate_while_something_is_evaluated():
    async with bench(**LENDS) as made:
        made.control.plans.hybrids = SimpleNamespace(present=())
        made.control.progress = (1, 4)
        await made.end_steps(READS, 8)
        reply = await made.desk.ask(is_dry_run=True)
        assert "not possible: nothing would serve, and an evaluation is going on" in reply.message


async def test_a_look_knows_how_long_training_could_go_on_alone():
    async with bench(lead_steps=7.0) as made:
        replica = HybridPlacement(replica_id=ReplicaId("hybrid-9"), slots=(SlotId(7),))
        plan = made.control.plans.plan
        made.control.plans.plan = replace(plan, instances=(), hybrids=(replica,))
        reply = await made.desk.ask(is_dry_run=True)
        assert "while there is something to train on, 7 batches now" in reply.message


async def test_a_kind_that_was_refused_is_left_out():
    async with bench(runtime_replan_cooldown_s=0.001) as made:
        wanted = await until_wanted(made)
        made.desk.on_event(ReconfigurationEnded(wanted.decision_id, "refused", 0.0, {}, "no"))
        reply = await made.desk.ask(is_dry_run=True)
        assert "left out since they were refused: reshape" in reply.message
        assert reply.details["verdict"] == "keep"


async def test_a_change_that_is_only_written_down_is_wanted_once_so_that_its_way_is_written_too():
    async with bench(runtime_training_pool_plan_only=True) as made:
        wanted = await until_wanted(made)
        assert made.written[-1].verdict == "keep"
        assert wanted.decision_id == made.written[-1].decision_id
        made.desk.on_event(ReconfigurationEnded(wanted.decision_id, "refused", 0.0, {}, "only"))
        num_written = len(made.written)
        for _ in range(12):
            made.end_step(WRITES)
        await settled(made, num_written + 1)
        assert len(made.posted) == 1


async def test_alone_it_writes_down_what_would_be_made_of_training():
    alone = {"runtime_reconfigure_training": False, "runtime_cluster_swap_enabled": False}
    async with bench(
        planned_for=WRITES,
        instances_of_one=True,
        arch=MEASURED_1_8B,
        runtime_training_pool_plan_only=True,
        **alone,
    ) as made:
        wanted = await until_wanted(made, load=READS)
        looked = made.written[-1]
        assert (looked.verdict, looked.is_dry_run) == ("keep", False)
        assert "only written down, since runtime_training_pool_plan_only is true" in looked.reason
        assert looked.numbers["recorded_earned_s"] > looked.numbers["recorded_price_s"]
        assert wanted.plan.hybrids
        plan, refused = made.control.plans.judged(made.control.pool, wanted.plan)
        assert refused.reason == "runtime_training_pool_plan_only: written down, not made"
        assert f"attach {plan.hybrids[0].replica_id}" in " ".join(refused.transitions)


async def test_what_the_changing_part_would_refuse_is_no_candidate():
    async with bench(runtime_cluster_swap_enabled=False) as made:
        for _ in range(6):
            made.end_step(WRITES)
        reply = await made.desk.ask(is_dry_run=True)
        assert reply.details["verdict"] == "keep"
        assert "not possible: " in reply.message
        assert "runtime_cluster_swap_enabled" in reply.message


async def test_a_run_whose_plan_may_not_change_refuses_and_shows():
    options = {"runtime_dynamic_reconfiguration_enabled": False}
    async with bench(**options, runtime_online_replanning=False) as made:
        await made.end_steps(WRITES, 12)
        refused = await made.desk.ask(is_dry_run=False)
        assert not refused.ok
        assert "--dry-run shows" in refused.message
        assert made.written == []
        assert (await made.desk.ask(is_dry_run=True)).ok


async def test_the_horizon_ends_with_the_steps_and_with_the_time():
    async with bench() as made:
        assert made.desk.last_in_words == ""
        made.end_step(READS)
        reply = await made.desk.ask(is_dry_run=True)
        assert reply.details["numbers"]["horizon_steps"] == 50
        made.step = 489
        made.end_step(READS)
        reply = await made.desk.ask(is_dry_run=True)
        assert reply.details["numbers"]["horizon_steps"] == 10
    async with bench(max_run_s=1500.0) as made:
        made.end_step(READS, step_s=150.0)
        reply = await made.desk.ask(is_dry_run=True)
        assert 9 < reply.details["numbers"]["horizon_steps"] <= 10


# A plan that is named


def fewer(made):
    """One instance less, in the words of an order."""
    *kept, _ = made.control.plans.plan.instances
    return PlanOrder(instances=tuple(TpBucket(count=1, tp=it.tp) for it in kept))


async def test_an_ordered_plan_is_written_with_what_is_expected_of_it_and_wanted():
    async with bench(instances_of_one=True) as made:
        made.end_step(READS)
        reply = await made.desk.order(fewer(made), is_dry_run=False)
        assert reply.ok, reply.message
        (record,) = made.written
        assert (record.verdict, record.switch_kind, record.is_dry_run) == (
            "ordered",
            "rollout",
            False,
        )
        assert record.reason == "ordered by the operator"
        assert record.numbers["candidate_step_s"] > record.numbers["step_s"] > 0
        ((wanted, num_written),) = made.posted
        assert num_written == 1
        assert wanted.decision_id == record.decision_id
        assert len(wanted.plan.instances) == len(made.control.plans.plan.instances) - 1
        gone = made.control.plans.plan.instances[-1].instance_id
        assert reply.details["transitions"][-1] == f"stop {gone}"
        assert f". stop {gone}" in reply.message
        assert made.desk.last_in_words == "change ordered after step 1: ordered by the operator"
        again = await made.desk.order(fewer(made), is_dry_run=False)
        assert not again.ok
        assert "another change of the plan is under way" in again.message


async def test_an_order_that_is_only_looked_at_is_written_and_not_wanted():
    async with bench(instances_of_one=True) as made:
        reply = await made.desk.order(fewer(made), is_dry_run=True)
        assert reply.ok
        assert reply.message.startswith("order looked at (decision 1, ")
        assert [it.is_dry_run for it in made.written] == [True]
        assert made.posted == []


async def test_the_planner_waits_for_the_cooldown_after_an_order_and_times_steps_anew():
    async with bench(instances_of_one=True, runtime_replan_cooldown_s=300.0) as made:
        for _ in range(6):
            made.end_step(READS)
        assert (await made.desk.order(fewer(made), is_dry_run=False)).ok
        wanted, _ = made.posted[0]
        made.desk.on_event(ReconfigurationEnded(wanted.decision_id, "done", 2.0, {}, ""))
        made.control.plans.plan = wanted.plan
        num_written = len(made.written)
        await made.end_steps(WRITES, 12)
        assert len(made.written) == num_written
        shown = await made.desk.ask(is_dry_run=True)
        # The two steps after a change still have some of it in them.
        assert shown.details["numbers"]["num_steps_timed"] == 10


async def test_an_order_that_is_refused_is_for_the_changing_part_to_write_and_binds_nobody():
    async with bench(instances_of_one=True, min_rollout_gpus=2) as made:
        order = fewer(made)
        reply = await made.desk.order(order, is_dry_run=False)
        assert not reply.ok
        assert reply.message.startswith("order refused (decision 1, ")
        assert "min_rollout_gpus 2 exceeds rollout_gpus" in reply.message
        wanted, _ = made.posted[0]
        assert "min_rollout_gpus 2 exceeds rollout_gpus" in wanted.reason
        made.desk.on_event(ReconfigurationEnded(1, "refused", 0.0, {}, "no"))
        shown = await made.desk.ask(is_dry_run=True)
        assert "left out since they were refused" not in shown.message
        assert "of the cooldown" not in shown.message


async def test_an_order_that_is_refused_is_not_shown_as_done_and_hides_none_that_is():
    async with bench(instances_of_one=True, min_rollout_gpus=2) as made:
        assert not (await made.desk.order(fewer(made), is_dry_run=False)).ok
        assert made.desk.last_in_words.startswith("order refused after step 0: ordered by")
        assert made.desk.outcomes.num_decisions == {"order_refused": 1}
    async with bench(instances_of_one=True) as made:
        await made.desk.order(fewer(made), is_dry_run=True)
        assert (await made.desk.order(fewer(made), is_dry_run=False)).ok
        assert not (await made.desk.order(fewer(made), is_dry_run=False)).ok
        assert made.desk.last_in_words == "change ordered after step 0: ordered by the operator"
        assert made.desk.outcomes.num_decisions == {"ordered": 1, "order_refused": 1}


async def test_step_times_with_a_replica_that_was_lost_are_not_those_of_the_plan_without_it():
    replica = HybridPlacement(replica_id=ReplicaId("hybrid-9"), slots=(SlotId(7),))
    async with bench() as made:
        plan = made.control.plans.plan
        made.control.plans.plan = replace(plan, hybrids=(replica,))
        for _ in range(6):
            made.end_step(READS)
        made.control.plans.plan = plan
        made.end_step(READS, step_s=90.0)
        made.end_step(READS, step_s=200.0)
        times = made.desk._question(is_asked=True).times
        assert (times.num_steps, times.mean_s) == (1, 200.0)


async def test_an_order_that_is_refused_only_when_its_turn_comes_binds_nobody_either():
    async with bench(instances_of_one=True) as made:
        assert (await made.desk.order(fewer(made), is_dry_run=False)).ok
        made.desk.on_event(ReconfigurationEnded(1, "refused", 0.0, {}, "the run is stopping"))
        assert made.desk._replanner._cooling_until < clock.now()
        assert (await made.desk.order(fewer(made), is_dry_run=False)).ok


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"committed": None}, "no version is served yet"),
        ({"stop_reason": "SIGTERM"}, "the run is stopping: SIGTERM"),
    ],
)
async def test_an_order_at_the_wrong_moment_is_refused(state, words):
    async with bench(instances_of_one=True) as made:
        for name, value in state.items():
            setattr(made.control, name, value)
        reply = await made.desk.order(fewer(made), is_dry_run=True)
        assert not reply.ok
        assert words in reply.message


async def test_a_plan_that_does_not_fit_is_refused_in_words():
    async with bench(instances_of_one=True) as made:
        reply = await made.desk.order(PlanOrder(hybrids=9), is_dry_run=False)
        assert not reply.ok
        assert "GPUs, and the run has 8" in reply.message
        assert made.written == made.posted == []


async def test_the_plan_in_force_is_no_order():
    async with bench(instances_of_one=True) as made:
        reply = await made.desk.order(PlanOrder(), is_dry_run=True)
        assert not reply.ok
        assert "this plan is in force already" in reply.message


async def test_a_run_whose_plan_may_not_change_refuses_an_order_and_shows_why():
    async with bench(instances_of_one=True, runtime_dynamic_reconfiguration_enabled=False) as made:
        refused = await made.desk.order(fewer(made), is_dry_run=False)
        assert not refused.ok
        assert made.written == []
        shown = await made.desk.order(fewer(made), is_dry_run=True)
        assert not shown.ok
        assert "runtime_dynamic_reconfiguration_enabled is false" in shown.message


async def test_an_order_may_use_what_every_node_has_and_no_other_node():
    async with bench() as made:
        plans = made.control.plans
        plans.policy = replace(plans.policy, num_slots=6, num_slots_elsewhere=(8, 8))
        plans.lost = frozenset({(NodeRank(2), SlotId(0))})
        room = made.desk._room(made.desk._question(is_asked=True))
        here = {(0, slot) for slot in range(6)}
        others = {(node, slot) for node in (1, 2) for slot in range(8)}
        assert set(room.slots()) == (here | others) - {(2, 0)}
        plans.policy = replace(plans.policy, num_slots=9)
        room = made.desk._room(made.desk._question(is_asked=True))
        assert len(set(room.slots())) == 23


async def test_without_lanes_the_way_back_of_replicas_is_said():
    async with bench(decouple_communication_domains=False) as made:
        reply = await made.desk.order(PlanOrder(hybrids=0), is_dry_run=True)
        assert not reply.ok
        assert "in force already; without lanes" in reply.message
        assert "name a smaller one (train_gpus)" in reply.message
    async with bench() as made:
        reply = await made.desk.order(PlanOrder(hybrids=0), is_dry_run=True)
        assert reply.message.endswith("in force already")
