"""The parts of deciding, each alone: change points, windows, costs, triggers, seats, the rule."""

from math import exp, inf, log

import numpy as np
import pytest
from msgspec.structs import replace

from libra.ids import InstanceId, NodeRank, ReplicaId, SlotId
from libra.planner.plan import HybridPlacement, InstancePlacement, Plan, TrainPlacement
from libra.planner.replan_change import change_point
from libra.planner.replan_costs import SwitchAccount, SwitchCost, SwitchCosts
from libra.planner.replan_levels import Levels
from libra.planner.replan_observed import ObservationWindow, StepObserved, StepTimes
from libra.planner.replan_rule import ModelError, model_error, worth
from libra.planner.replan_seating import Room, seated
from libra.planner.replan_triggers import Triggers


def observed(step, *, response=1000, step_s=10.0, idle=0.0, num=40, **rest):
    return StepObserved(
        step=step,
        lengths=[(100, response)] * num,
        step_s=step_s,
        trainer_idle_fraction=idle,
        rollout_idle_fraction=0.0,
        **rest,
    )


def window(max_steps=16, num_warm_up=0):
    return ObservationWindow(max_steps=max_steps, num_warm_up=num_warm_up)


class TestChangePoint:
    def test_a_new_level_is_found_where_it_begins_and_how_high_it_is(self):
        found = change_point([log(10)] * 9 + [log(20)] * 3)
        assert found.index == 9
        assert found.ratio == pytest.approx(2.0)

    def test_one_outlier_at_the_end_is_not_a_level(self):
        assert change_point([log(10)] * 9 + [log(20)]) is None

    def test_less_than_a_tenth_is_no_change_however_clear(self):
        assert change_point([log(10)] * 40 + [log(10.9)] * 40) is None

    def test_few_values_say_nothing(self):
        assert change_point([log(10)] * 3 + [log(40)] * 2) is None

    def test_noise_is_rarely_taken_for_a_change(self):
        rng = np.random.default_rng(1)
        alarms = sum(
            change_point(list(0.2 * rng.standard_normal(16))) is not None for _ in range(1000)
        )
        assert alarms < 15


class TestWindow:
    def test_older_steps_than_the_window_holds_are_forgotten(self):
        seen = window(max_steps=4)
        for step in range(10):
            seen.add(observed(step), is_timed=True)
        assert [step.step for step in seen.steps] == [6, 7, 8, 9]

    def test_steps_while_the_pipeline_fills_are_left_out(self):
        seen = window(num_warm_up=2)
        for step in range(3):
            seen.add(observed(step), is_timed=True)
        assert [step.step for step in seen.steps] == [2]

    def test_steps_in_which_nothing_ended_tell_nothing(self):
        seen = window()
        assert not seen.add(observed(1, num=0), is_timed=True)
        assert seen.num_steps == 0

    def test_it_begins_anew_where_lengths_change_and_says_so(self):
        seen = window()
        said = [seen.add(observed(s, response=500 if s < 8 else 1500), is_timed=True)
                for s in range(10)]  # fmt: skip
        assert said[-1] == "responses are 3.00 times as long since step 8"
        assert [step.step for step in seen.steps] == [8, 9]

    def test_it_begins_anew_where_step_times_change_too(self):
        seen = window()
        said = [
            seen.add(observed(step, step_s=10.0 if step < 8 else 15.0), is_timed=True)
            for step in range(10)
        ]
        assert said[-1] == "steps take 1.50 times as long since step 8"
        assert seen.times() == StepTimes(num_steps=2, mean_s=15.0, deviation_s=0.0)

    def test_steps_with_a_change_in_them_have_no_time_but_lengths(self):
        seen = window()
        seen.add(observed(1, step_s=10.0), is_timed=True)
        seen.add(observed(2, step_s=90.0), is_timed=False)
        assert seen.times().mean_s == 10.0
        assert seen.num_steps == 2

    def test_times_of_a_plan_that_is_gone_are_forgotten_and_lengths_kept(self):
        seen = window()
        seen.add(observed(1), is_timed=True)
        seen.forget_times()
        assert seen.times() is None
        assert seen.num_steps == 1


class TestSorts:
    def seen(self, *means, timed=lambda _index: True, **rest):
        made = window(**rest)
        for index, (response, step_s) in enumerate(means):
            made.add(observed(index, response=response, step_s=step_s), is_timed=timed(index))
        return made

    def test_steps_with_little_in_common_are_told_apart(self):
        made = self.seen((400, 10.0), (4000, 30.0), (450, 10.0), (3500, 30.0))
        assert [[it.step for it in sort] for sort in made.sorts()] == [[0, 2], [1, 3]]

    def test_steps_that_are_alike_are_one_sort(self):
        made = self.seen((400, 10.0), (500, 10.0), (600, 10.0))
        assert [len(sort) for sort in made.sorts()] == [3]

    def test_each_sort_counts_as_often_as_it_occurs_and_noise_is_that_within_sorts(self):
        made = self.seen(
            (400, 10.0), (4000, 30.0), (400, 10.0), (400, 10.0), timed=lambda index: index < 3
        )
        assert made.times() == StepTimes(num_steps=3, mean_s=15.0, deviation_s=0.0)

    def test_before_a_step_of_each_sort_was_timed_there_are_no_times(self):
        made = self.seen((400, 10.0), (4000, 30.0), timed=lambda index: index == 0)
        assert made.times() is None


class TestLevels:
    def levels(self, *lasted):
        """Upwards first; one step of the newest level was seen for each of the last entry."""
        made, is_upwards = Levels(), True
        for num_steps in lasted:
            made.on_step()
            made.on_change(1, is_upwards=is_upwards)
            is_upwards = not is_upwards
            for _ in range(num_steps - 1):
                made.on_step()
        return made

    def test_a_level_that_nothing_is_known_of_lasts_ten_times_its_age(self):
        assert self.levels(2).left_steps(2) == 20.0

    def test_of_one_that_follows_others_what_they_lasted_is_left_less_what_goes_unnoticed(self):
        assert self.levels(20, 30, 6).left_steps(6) == 25.0 - 6.0 - 2.0

    def test_one_that_has_lasted_longer_than_those_before_is_like_an_unknown_one(self):
        assert self.levels(20, 20, 21).left_steps(21) == 210.0

    def test_a_drift_in_one_direction_is_one_level(self):
        made = Levels()
        for _ in range(10):
            for _ in range(4):
                made.on_step()
            made.on_change(2, is_upwards=True)
        assert made.lasted_steps == inf


class TestQuickLevels:
    def alternating(self, num_steps, *, lasts):
        made = window()
        said = [
            made.add(observed(step, response=4000 if step // lasts % 2 else 400), is_timed=True)
            for step in range(num_steps)
        ]
        return made, said

    def test_levels_that_last_half_a_window_are_followed(self):
        made, said = self.alternating(60, lasts=12)
        assert made.is_followed
        assert sum(map(bool, said)) == 4
        assert made.num_steps == 12

    def test_quicker_ones_are_not_and_the_whole_window_counts(self):
        made, said = self.alternating(60, lasts=6)
        assert not made.is_followed
        assert made.num_steps == 16
        (_, last) = filter(None, said)
        assert last.endswith(", and levels last less than 8 steps")

    def test_one_that_stays_after_quick_ones_is_followed_again(self):
        made, _ = self.alternating(60, lasts=6)
        said = [made.add(observed(60 + k, response=400), is_timed=True) for k in range(12)]
        assert made.is_followed
        assert list(filter(None, said)) == ["the level has lasted since step 60"]


class TestCosts:
    def test_the_prior_counts_until_the_first_of_a_kind_and_is_half_wrong(self):
        costs = SwitchCosts(prior_s=60.0)
        costs.add("reshape", 200.0)
        assert costs.of("rollout") == SwitchCost(mean_s=60.0, deviation_s=30.0, num_measured=0)
        assert costs.of("reshape").mean_s == 200.0

    def test_the_newest_measurements_give_mean_and_deviation(self):
        costs = SwitchCosts(prior_s=60.0)
        for cost_s in [1000.0] + [10.0, 14.0] * 4:
            costs.add("rollout", cost_s)
        found = costs.of("rollout")
        assert found.num_measured == 8
        assert found.mean_s == 12.0
        assert found.deviation_s == pytest.approx(2.138, abs=1e-3)

    def test_measurements_that_agree_still_leave_a_tenth_of_doubt(self):
        costs = SwitchCosts(prior_s=6.0)
        for _ in range(3):
            costs.add("rollout", 10.0)
        assert costs.of("rollout").deviation_s == 1.0

    def test_one_lucky_measurement_does_not_make_changes_free(self):
        costs = SwitchCosts(prior_s=60.0)
        costs.add("rollout", 0.0)
        assert costs.of("rollout") == SwitchCost(mean_s=0.0, deviation_s=30.0, num_measured=1)
        costs.add("rollout", 0.0)
        assert costs.of("rollout").deviation_s == 7.5

    def account(self, **changes):
        return SwitchAccount(kind="rollout", **{"usual_s": 10.0, "expected_s": 8.0, **changes})

    def test_a_change_costs_what_its_steps_took_beyond_the_usual(self):
        account = self.account()
        account.on_step(15.0)
        account.on_ended(3.0, ok=True)
        account.on_step(12.0)
        assert not account.is_complete
        account.on_step(8.0)
        assert account.is_complete
        assert account.cost_s == 5.0 + 4.0 + 0.0

    def test_it_costs_at_least_what_the_trainer_stood_still(self):
        account = self.account()
        account.on_ended(30.0, ok=True)
        account.on_step(8.0)
        account.on_step(8.0)
        assert account.cost_s == 30.0

    def test_after_one_that_failed_steps_are_measured_by_the_plan_before(self):
        account = self.account()
        account.on_ended(0.0, ok=False)
        account.on_step(12.0)
        account.on_step(10.0)
        assert account.cost_s == 2.0

    def test_without_a_usual_step_only_the_stall_is_known(self):
        account = self.account(usual_s=None)
        account.on_ended(4.0, ok=True)
        account.on_step(100.0)
        assert account.cost_s == 4.0


class TestTriggers:
    def test_the_interval_asks_for_a_look_and_begins_anew_with_it(self):
        triggers = Triggers(interval_steps=3)
        for step in range(3):
            assert not triggers.reasons
            triggers.on_step(observed(step), changed="")
        assert triggers.take() == ("3 steps since the last look",)
        triggers.on_step(observed(4), changed="")
        assert triggers.reasons == ()

    def test_drift_asks_at_once(self):
        triggers = Triggers(interval_steps=100)
        triggers.on_step(observed(1), changed="responses are longer")
        assert triggers.take() == ("responses are longer",)

    def test_after_drift_it_asks_again_while_the_window_is_young(self):
        triggers = Triggers(interval_steps=10)
        triggers.on_step(observed(0), changed="responses are longer")
        triggers.take()
        asked_at = []
        for step in range(1, 30):
            triggers.on_step(observed(step), changed="")
            if triggers.reasons:
                triggers.take()
                asked_at.append(step)
        assert asked_at == [1, 2, 4, 8, 18, 28]

    def test_reasons_that_only_count_steps_are_said_once_however_long_they_wait(self):
        triggers = Triggers(interval_steps=5)
        triggers.on_step(observed(0), changed="responses are longer")
        for step in range(1, 12):
            triggers.on_step(observed(step), changed="")
        assert triggers.take() == (
            "responses are longer",
            "4 steps more since that change",
            "12 steps since the last look",
        )

    @pytest.mark.parametrize(
        ("field", "said"),
        [
            ("queued_fraction", "requests queue in engines: 100%"),
            ("kv_use_fraction", "KV use: 100%"),
            ("staleness_fraction", "staleness of its bound: 100%"),
        ],
    )
    def test_pressure_asks_once_when_it_arises_and_again_after_relief(self, field, said):
        triggers = Triggers(interval_steps=1000)

        def seen(value, num_steps):
            for step in range(num_steps):
                triggers.on_step(observed(step, **{field: value}), changed="")
            return triggers.take()

        assert seen(0.0, 3) == ()
        (first,) = seen(1.0, 30)
        assert first.startswith(said.partition(":")[0])
        assert seen(1.0, 30) == ()
        assert seen(0.0, 30) == ()
        assert len(seen(1.0, 30)) == 1

    def test_pressure_that_wavers_around_its_level_asks_once(self):
        triggers = Triggers(interval_steps=1000)
        for idle in (0.45, 0.35) * 20:
            for step in range(8):
                triggers.on_step(observed(step, idle=idle), changed="")
        assert triggers.take() == ("the trainer waits for rollouts: 45%",)

    def test_one_step_of_idling_is_no_pressure(self):
        triggers = Triggers(interval_steps=1000)
        for idle in (0.0, 1.0, 0.0, 0.0):
            triggers.on_step(observed(1, idle=idle), changed="")
        assert triggers.take() == ()


class TestRule:
    def cost(self, mean_s=60.0, deviation_s=30.0):
        return SwitchCost(mean_s=mean_s, deviation_s=deviation_s, num_measured=0)

    def of(self, **changes):
        return worth(
            **{
                "expected_s": 100.0,
                "candidate_s": 90.0,
                "error": ModelError(bias=1.0, fraction=0.02),
                "cost": self.cost(),
                "horizon_steps": 50.0,
                **changes,
            }
        )

    def test_it_compares_the_horizons_gain_with_the_cost_and_its_uncertainty(self):
        found = self.of()
        assert found.sure_gain_s == pytest.approx(8.0)
        assert found.earned_s == pytest.approx(400.0)
        assert found.price_s == 120.0
        assert found.is_enough

    def test_a_gain_within_the_models_error_is_none(self):
        assert self.of(candidate_s=98.5).sure_gain_s < 0

    def test_an_uncertain_cost_has_to_be_earned_too(self):
        assert not self.of(cost=self.cost(deviation_s=200.0)).is_enough

    @pytest.mark.parametrize("bias", [0.5, 2.0])
    def test_a_model_that_is_off_promises_less(self, bias):
        measured = self.of(error=ModelError(bias=bias, fraction=0.0))
        assert measured.sure_gain_s < bias * 10.0 or bias > 1
        assert measured.sure_gain_s <= 10.0

    def test_the_error_is_that_of_a_mean_and_never_nothing(self):
        times = StepTimes(num_steps=16, mean_s=110.0, deviation_s=22.0)
        assert model_error(expected_s=100.0, times=times) == ModelError(bias=1.1, fraction=0.05)
        calm = replace(times, deviation_s=0.0)
        assert model_error(expected_s=100.0, times=calm).fraction == 0.02

    def test_before_two_steps_are_timed_a_tenth_may_be_wrong(self):
        assert model_error(expected_s=100.0, times=None) == ModelError(bias=1.0, fraction=0.1)
        one = StepTimes(num_steps=1, mean_s=120.0, deviation_s=0.0)
        assert model_error(expected_s=100.0, times=one) == ModelError(bias=1.2, fraction=0.1)

    def test_both_sides_are_said_with_their_numbers(self):
        said = self.of().in_words()
        assert "90.0 s a step for 100.0 s" in said
        assert "+400 s in 50 steps" in said
        assert "costs 120 s (60 s and 2 x 30 s of uncertainty, none measured yet)" in said

    def test_every_number_is_finite(self):
        assert all(abs(value) < inf for value in self.of().numbers().values())


def placed(*tps, core=4, hybrids=()):
    """Instances on the first slots of one node, the core on the last, hybrids before it."""
    instances, first = [], 0
    for index, tp in enumerate(tps):
        slots = tuple(SlotId(first + k) for k in range(tp))
        instances.append(InstancePlacement(instance_id=InstanceId(f"vllm-{index}"), tp=tp,
                                           slots=slots))  # fmt: skip
        first += tp
    return Plan(
        strategy="grp",
        train=TrainPlacement(
            tp=1, pp=1, cp=1, ep=1, dp=core, slots=tuple(SlotId(8 - core + k) for k in range(core))
        ),
        instances=tuple(instances),
        hybrids=tuple(
            HybridPlacement(replica_id=ReplicaId(f"hybrid-{k}"), slots=(SlotId(slot),))
            for k, slot in enumerate(hybrids)
        ),
    )


class TestSeating:
    ROOM = Room(num_gpus=8, gpus_per_node=8)

    def seat(self, plan, *tps, num_replicas=0, room=ROOM, replica_gpus=1):
        return seated(plan, tps, num_replicas=num_replicas, replica_gpus=replica_gpus, room=room)

    def test_instances_that_are_still_wanted_stay_where_they_are(self):
        plan = placed(1, 1, 2)
        found = self.seat(plan, 2, 1, 1)
        assert set(found.instances) == set(plan.instances)

    def test_new_ones_get_the_slots_of_those_that_go_and_new_names(self):
        found = self.seat(placed(1, 1, 2), 2, 2)
        kept, new = found.instances
        assert (kept.instance_id, kept.slots) == ("vllm-2", (2, 3))
        assert (new.instance_id, new.slots) == ("vllm-3", (0, 1))

    def test_others_move_when_there_is_no_other_way(self):
        plan = placed(1, 2, 1)
        assert self.seat(plan, 4).instances[0].slots == (0, 1, 2, 3)

    def test_instances_that_break_up_every_node_move(self):
        nodes = Room(num_gpus=4, gpus_per_node=2)
        first, second = placed(1, 1).instances
        second = replace(second, node=NodeRank(1), slots=(SlotId(0),))
        plan = replace(placed(core=0), instances=(first, second))
        found = self.seat(plan, 2, 1, 1, room=nodes)
        assert [(i.node, i.slots) for i in found.instances] == [(0, (0, 1)), (1, (0,)), (1, (1,))]

    def test_a_replica_takes_the_slots_beside_the_core_and_the_core_stays(self):
        plan = placed(1, 1, 1, 1)
        found = self.seat(plan, 1, 1, 1, num_replicas=1)
        assert found.hybrids[0].slots == (3,)
        assert found.train == plan.train
        assert [i.instance_id for i in found.instances] == ["vllm-0", "vllm-1", "vllm-2"]

    def test_an_idle_slot_is_lent_before_a_serving_one(self):
        found = self.seat(placed(2), 2, num_replicas=1)
        assert found.hybrids[0].slots == (3,)
        assert found.instances[0].instance_id == "vllm-0"

    def test_names_of_replicas_are_not_used_again(self):
        plan = placed(1, 1, hybrids=(2, 3))
        fewer = self.seat(plan, 1, 1, 1, num_replicas=1)
        assert [h.replica_id for h in fewer.hybrids] == ["hybrid-0"]
        more = self.seat(placed(1, hybrids=(2, 3)), 1, num_replicas=3)
        assert [h.replica_id for h in more.hybrids] == ["hybrid-0", "hybrid-1", "hybrid-2"]

    def test_no_instance_crosses_a_node(self):
        two_nodes = Room(num_gpus=8, gpus_per_node=3)
        assert self.seat(placed(core=0), 4, room=two_nodes) is None
        found = self.seat(placed(core=0), 2, 2, room=two_nodes)
        assert [(i.node, i.slots) for i in found.instances] == [(0, (0, 1)), (1, (0, 1))]

    def test_a_replica_larger_than_a_node_takes_slots_of_several(self):
        nodes = Room(num_gpus=8, gpus_per_node=2)
        plan = replace(placed(core=0), train=replace(placed().train, slots=(), dp=0))
        (hybrid,) = self.seat(plan, num_replicas=1, replica_gpus=4, room=nodes).hybrids
        assert hybrid.nodes == (NodeRank(2), NodeRank(2), NodeRank(3), NodeRank(3))
        assert hybrid.slots == (0, 1, 0, 1)

    def test_lost_slots_are_left_out_and_the_others_used(self):
        lost = Room(num_gpus=7, gpus_per_node=8, lost=frozenset({(NodeRank(0), SlotId(1))}))
        found = self.seat(placed(1), 1, 1, num_replicas=1, room=lost)
        used = {slot for i in (*found.instances, *found.hybrids) for slot in i.slots}
        assert used == {0, 2, 3}
        assert self.seat(placed(1), 1, 1, 1, num_replicas=1, room=lost) is None

    def test_what_a_change_put_on_a_spare_slot_stays_there(self):
        plan = placed(1, hybrids=(9,))
        assert self.seat(plan, 1, 1, num_replicas=1).hybrids == plan.hybrids

    def test_without_room_there_is_no_plan(self):
        lost = Room(num_gpus=7, gpus_per_node=8, lost=frozenset({(NodeRank(0), SlotId(3))}))
        assert self.seat(placed(1, hybrids=(3,)), 1, num_replicas=1, room=lost) is None
        assert self.seat(placed(1), 4, 1) is None
        assert self.seat(placed(1), num_replicas=5) is None


def test_growth_of_four_percent_a_step_is_a_change_in_the_end():
    seen = window()
    said = [
        seen.add(observed(step, response=round(500 * exp(0.04 * step))), is_timed=True)
        for step in range(60)
    ]
    assert any(said)
