import msgspec
import pytest

from libra.config.rollout import TpBucket
from libra.errors import ConfigError, InfeasiblePlanError, InvariantError
from libra.planner.calibration import Calibration, Observation, observe
from libra.planner.cost_models import cost_models
from libra.planner.demand import Demand, observed_demand, prior_demand
from libra.planner.render import render_plan
from libra.planner.search import plan
from planner_cases import (
    A100_80G,
    H200_141G,
    MEASURED_1_8B,
    QWEN3_14B,
    QWEN3_30B_A3B,
    grp_config,
)


def reasons(report):
    return {pruned.branch: pruned.reason for pruned in report.pruned}


def test_the_whole_budget_is_split_and_every_device_has_one_user():
    report = plan(grp_config())
    train, instances = report.plan.train, report.plan.instances
    used = [(train.node_of_rank(rank), slot) for rank, slot in enumerate(train.slots)]
    used += [(instance.node, slot) for instance in instances for slot in instance.slots]
    assert len(used) == len(set(used)) == 48
    assert train.world_size == report.choice.train.num_gpus == len(train.slots)


def test_tensor_parallel_groups_stay_inside_nodes():
    report = plan(grp_config(planner={"allowed_train_tp": [8], "allocation_granularity_gpus": 4}))
    train = report.plan.train
    for first in range(0, train.world_size, train.tp):
        assert len({train.node_of_rank(first + offset) for offset in range(train.tp)}) == 1


def test_the_step_is_the_slower_side_and_no_runner_up_of_another_split_is_faster():
    report = plan(grp_config())
    best = report.choice.estimate
    assert best.step_s == pytest.approx(max(best.train_s, best.rollout_s), rel=0.05)
    assert all(option.estimate.step_s >= best.step_s / 1.02 for option in report.runners_up)
    assert {option.train.num_gpus for option in report.runners_up} - {report.choice.train.num_gpus}


def test_gpus_that_hardly_speed_up_rollout_are_spent_on_training():
    config = grp_config(
        num_gpus=8,
        arch=MEASURED_1_8B,
        hardware=H200_141G,
        batch_size=64,
        max_new_tokens=2048,
        planner={"allocation_granularity_gpus": 1},
    )
    report = plan(config)
    assert report.choice.train.num_gpus == 4
    step_of = {o.train.num_gpus: o.estimate.step_s for o in report.runners_up}
    assert step_of[1] <= report.choice.estimate.step_s <= 1.02 * step_of[1]


def test_longer_responses_move_gpus_to_rollout():
    config = grp_config(batch_size=240, planner={"allowed_train_tp": [4], "allowed_train_pp": [1]})

    def train_gpus(length):
        demand = Demand(prompt_tokens=(2000,) * 240, response_tokens=(length,) * 240, source="test")
        return plan(config, demand=demand).choice.train.num_gpus

    assert train_gpus(500) > train_gpus(16000)


def test_with_known_lengths_a_long_tail_gets_instances_of_several_degrees():
    config = grp_config(planner={"prior_response_sigma": 1.2})
    assert len(set(plan(config, lengths_known=True).choice.rollout_tps)) > 1


def test_without_known_lengths_no_instance_is_too_slow_for_the_longest_response():
    report = plan(grp_config(planner={"prior_response_sigma": 1.2}))
    assert len(set(report.choice.rollout_tps)) == 1
    assert len(set(report.by_length.tp_degrees)) > 1
    assert report.by_length.makespan_s < report.choice.estimate.rollout.makespan_s
    assert "if lengths were known in advance" in render_plan(report)


def test_a_mix_is_filled_by_capacity_only_when_the_router_counts_kv_tokens():
    def requests_by_tp(load_metric):
        config = configured(training={"train_tp_size": 4})
        scheduling = msgspec.structs.replace(
            config.heterogeneous_rollout.scheduling, load_metric=load_metric
        )
        heterogeneous = msgspec.structs.replace(config.heterogeneous_rollout, scheduling=scheduling)
        report = plan(msgspec.structs.replace(config, heterogeneous_rollout=heterogeneous))
        return {b.tp: b.num_requests for b in report.choice.estimate.rollout.blocks}

    by_requests, by_capacity = requests_by_tp("requests"), requests_by_tp("kv_tokens")
    assert by_requests[8] == by_requests[1]
    assert by_capacity[8] > 8 * by_capacity[1]


def test_allowed_degrees_are_the_only_ones_used():
    report = plan(
        grp_config(
            planner={
                "allowed_train_tp": [4],
                "allowed_train_pp": [2],
                "allowed_rollout_tp": [2],
            }
        )
    )
    options = [report.choice, *report.runners_up]
    assert {(option.train.tp, option.train.pp) for option in options} == {(4, 2)}
    assert {tp for option in options for tp in option.rollout_tps} == {2}


def test_minima_are_kept_on_both_sides():
    pinned = {"min_train_gpus": 8, "min_rollout_gpus": 40}
    report = plan(grp_config(planner=pinned))
    assert report.choice.train.num_gpus == 8
    assert sum(report.choice.rollout_tps) == 40


def test_granularity_keeps_training_on_whole_nodes():
    report = plan(grp_config(planner={"allocation_granularity_gpus": 16}))
    assert {option.train.num_gpus % 16 for option in (report.choice, *report.runners_up)} == {0}


def test_what_does_not_fit_says_what_it_lacked():
    found = reasons(plan(grp_config()))
    assert found["TP1 PP1"].endswith("of 80.0 GiB: gradients (at best, with DP32)")
    assert found["TP16"] == "a node has 8 GPUs (allow_cross_node_tp is false)"
    assert found["TP1 PP16"] == "40 layers do not divide into 16 stages"
    assert found["24 training GPUs"].startswith("DP 3, 6, 12, 24: does not divide 512")


def test_pipelines_with_too_large_a_bubble_are_left():
    strict = {"train_pipeline_bubble_ratio_threshold": 0.0}
    found = plan(grp_config(planner=strict))
    assert found.choice.train.pp == 1
    assert "bubble" in reasons(found)["TP2 PP2"]


def test_communication_ratios_prune_tensor_branches():
    report = plan(
        grp_config(
            arch=MEASURED_1_8B,
            hardware=H200_141G,
            num_gpus=8,
            batch_size=64,
            max_new_tokens=2048,
            planner={
                "train_comm_compute_ratio_threshold": 0.05,
                "allocation_granularity_gpus": 1,
            },
        )
    )
    assert report.choice.train.tp == 1
    assert "communication is" in reasons(report)["TP2"]


def test_a_branch_without_data_parallel_ranks_says_which_numbers_were_in_the_way():
    found = reasons(plan(grp_config(batch_size=31, planner={"allowed_train_pp": [1, 5]})))
    indivisible = "does not divide 31 trajectories per optimizer step"
    assert found["TP1 PP5"] == f"DP 8: {indivisible}"
    assert found["24 training GPUs"] == f"DP 3, 6, 12, 24: {indivisible}"
    with pytest.raises(InfeasiblePlanError, match="TP1 PP1 CP64: needs 64 GPUs, 40 may train"):
        plan(grp_config(training={"train_cp_size": 64}))
    odd = grp_config(num_gpus=32, planner={"allowed_train_tp": [4, 8], "allowed_train_pp": [1, 5]})
    assert reasons(plan(odd))["TP4 PP5"] == "no number of training GPUs is a multiple of 20"


def test_a_size_without_whole_expert_groups_says_so():
    planner = {"allowed_train_tp": [8], "allowed_train_ep": [4], "allowed_train_pp": [1]}
    found = reasons(plan(grp_config(arch=QWEN3_30B_A3B, planner=planner)))
    assert found["16 training GPUs"] == "DP 2: is no multiple of EP4"
    assert found["24 training GPUs"].startswith("DP 3: does not divide 512")


def test_communication_ratios_prune_expert_branches():
    report = plan(
        grp_config(
            arch=QWEN3_30B_A3B,
            planner={
                "allowed_train_tp": [8],
                "allowed_train_ep": [1, 4],
                "train_ep_comm_compute_ratio_threshold": 0.01,
            },
        ),
    )
    assert report.choice.train.ep == 1
    assert "all-to-all is" in reasons(report)["TP8 EP4"]


@pytest.mark.parametrize("over", [0.99, 1.01])
def test_a_communication_ratio_prunes_just_above_its_threshold(over):
    config = grp_config(arch=QWEN3_30B_A3B)
    model = cost_models(config, Calibration(hardware="", model="")).train
    tensor, expert = model.tensor_comm_ratio(8), model.expert_comm_ratio(4, 8)
    planner = {
        "allowed_train_tp": [4, 8],
        "allowed_train_ep": [1, 8],
        "train_comm_compute_ratio_threshold": tensor / over,
        "train_ep_comm_compute_ratio_threshold": expert / over,
    }
    found = reasons(plan(grp_config(arch=QWEN3_30B_A3B, planner=planner)))
    assert ("TP8" in found) == (over > 1)
    assert ("TP4 EP8" in found) == (over > 1)
    if over > 1:
        assert found["TP8"].startswith(f"communication is {tensor:.2f} of computation, over ")
        assert found["TP4 EP8"].startswith(f"all-to-all is {expert:.2f} of computation, over ")


def test_expert_parallelism_is_searched_for_mixtures_and_must_divide_the_experts():
    config = grp_config(
        arch=QWEN3_30B_A3B,
        planner={
            "allowed_train_ep": [1, 3, 4, 8],
            "allowed_train_tp": [1, 2],
            "allowed_train_pp": [1],
        },
    )
    report = plan(config)
    assert report.choice.train.ep > 1
    assert reasons(report)["TP1 EP3"] == "128 experts do not divide by it"


def test_expert_parallelism_for_a_dense_model_is_refused_with_its_reason():
    report = plan(grp_config(planner={"allowed_train_ep": [1, 8]}))
    assert reasons(report)["EP above 1"] == "the model has no experts"
    assert report.choice.train.ep == 1


def test_context_parallel_is_raised_only_as_far_as_memory_asks():
    config = grp_config(
        batch_size=64,
        max_new_tokens=62_000,
        megatron={"megatron_recompute_granularity": "none"},
        planner={"allowed_train_tp": [8], "allowed_train_pp": [1]},
    )
    report = plan(config)
    assert report.choice.train.cp == 2
    assert "GiB" in reasons(report)["TP8 PP1"]


def test_an_infeasible_cluster_names_every_reason():
    small = msgspec.structs.replace(A100_80G, memory_bytes=8 * 2**30)
    with pytest.raises(InfeasiblePlanError, match=r"rollout TP1: .*GiB of 7.2 GiB: weights"):
        plan(grp_config(hardware=small))


def test_more_gpus_than_the_hardware_has_is_infeasible():
    with pytest.raises(InfeasiblePlanError, match="is 64; hardware describes 48 GPUs"):
        plan(grp_config(num_gpus=64))


def test_a_granularity_that_leaves_no_split_is_infeasible():
    with pytest.raises(InfeasiblePlanError, match="cannot be split in steps of 40"):
        plan(grp_config(planner={"allocation_granularity_gpus": 40, "min_rollout_gpus": 16}))


def test_the_planner_asks_for_what_the_configuration_does_not_describe():
    config = msgspec.structs.replace(grp_config(), hardware=None)
    with pytest.raises(ConfigError, match=r"needs hardware: .* hardware_config"):
        plan(config)


def test_an_excluded_layout_is_not_chosen_again_and_says_why():
    config = grp_config()
    first = plan(config)
    second = plan(config, excluded=frozenset({first.choice.train}))
    assert second.choice.train != first.choice.train
    assert "its recompute probe did not fit" in reasons(second).values()


def test_odd_degrees_respect_node_boundaries():
    config = grp_config(
        arch=msgspec.structs.replace(
            QWEN3_14B,
            num_attention_heads=48,
            num_key_value_heads=12,
            intermediate_size=17_664,
            vocab_size=153_600,
        ),
        planner={"allowed_rollout_tp": [3]},
    )
    report = plan(config)
    for instance in report.plan.instances:
        assert len(instance.slots) == 3
        assert max(instance.slots) < 8


def configured(**sections):
    config = grp_config(planner={"initial_allocation_strategy": "configured"}, **sections)
    buckets = [TpBucket(tp=8, count=2), TpBucket(tp=1, count=8)]
    heterogeneous = msgspec.structs.replace(config.heterogeneous_rollout, instances=buckets)
    return msgspec.structs.replace(config, heterogeneous_rollout=heterogeneous)


@pytest.mark.parametrize(
    ("node_gpus", "num_gpus", "train_tp", "rollout_tps", "expected"),
    [
        # Training takes two of each node of three, and one instance fits nowhere.
        (3, 7, [2], [2], (2,)),
        # The wide instance has no room beside training, the narrow one does.
        (4, 5, [2], [2, 3], (2,)),
        (6, 8, [4], [1, 4], (1, 1, 1, 1)),
    ],
)
def test_odd_nodes_get_the_instances_that_find_room_beside_training(
    node_gpus, num_gpus, train_tp, rollout_tps, expected
):
    config = grp_config(
        num_gpus=num_gpus,
        arch=msgspec.structs.replace(MEASURED_1_8B, intermediate_size=9216, vocab_size=153_600),
        hardware=msgspec.structs.replace(H200_141G, gpus_per_node=node_gpus, nodes=3),
        batch_size=24,
        max_new_tokens=4096,
        planner={
            "allocation_granularity_gpus": 1,
            "allowed_train_tp": train_tp,
            "allowed_rollout_tp": rollout_tps,
            "prior_response_sigma": 1.5,
        },
    )
    assert plan(config).choice.rollout_tps == expected


def test_a_configured_split_is_kept_and_estimated():
    report = plan(configured(training={"train_tp_size": 4}))
    assert report.plan.strategy == "configured"
    assert report.choice.rollout_tps == (8, 8, 1, 1, 1, 1, 1, 1, 1, 1)
    assert report.choice.estimate.step_s > 0
    assert report.runners_up == ()


def test_a_configured_split_needs_no_description_of_the_hardware():
    report = plan(msgspec.structs.replace(configured(), hardware=None, model_arch=None))
    assert report.choice.estimate is None
    assert "no estimates" in render_plan(report)


def test_a_rendered_plan_names_choice_runners_up_and_reasons():
    text = render_plan(plan(grp_config()))
    assert "runners-up" in text
    assert "TP16: a node has 8 GPUs" in text
    assert "calibration: none" in text


def test_too_little_concurrency_for_the_estimate_is_said():
    report = plan(grp_config(rollout={"max_concurrent_rollouts": 64}))
    assert "max_concurrent_rollouts 64 is below the 512" in report.notes[0]


def test_the_prior_has_the_configured_mean_and_never_exceeds_the_limit():
    config = grp_config(planner={"prior_response_mean_tokens": 1000, "prior_response_sigma": 0.5})
    demand = prior_demand(config)
    assert demand.num_sequences == 512
    assert demand.num_response_tokens / 512 == pytest.approx(1000, rel=0.01)
    assert max(demand.response_tokens) <= 16384


def test_observed_lengths_replace_the_prior_at_their_own_quantiles():
    config = grp_config(batch_size=4)
    demand = observed_demand(config, [(10, n) for n in range(9000, 10_000)])
    assert demand.response_tokens == (9125, 9375, 9625, 9875)


def test_lengths_of_a_run_with_longer_sequences_are_cut_and_that_is_said():
    config = grp_config(batch_size=4)
    demand = observed_demand(config, [(100, 10**9), (10**9, 5), (100, 7), (100, 9)])
    limit = config.rollout.max_model_len
    assert demand.response_tokens == (1, 7, 9, limit - 100)
    assert demand.prompt_tokens == (limit - 1, 100, 100, 100)
    assert demand.source == f"observed: 4 trajectories, 2 of them cut at max_model_len {limit}"


def test_siblings_on_one_prefix_cache_prefill_their_prompt_once():
    config = grp_config()
    scheduling = msgspec.structs.replace(
        config.heterogeneous_rollout.scheduling, prefix_affinity=True
    )
    shared = msgspec.structs.replace(
        config,
        heterogeneous_rollout=msgspec.structs.replace(
            config.heterogeneous_rollout, scheduling=scheduling
        ),
    )
    assert prior_demand(config).prefill_share == 1
    assert prior_demand(shared).prefill_share == 1 / 8


@pytest.mark.parametrize(
    ("max_head_offpolicyness", "max_concurrent_rollouts", "num_batches"),
    [(0.0, 4096, 1), (1.0, 1024, 2), (3.0, 1024, 2), (float("inf"), 100_000, 8), (2.0, 100, 1)],
)
def test_batches_in_flight_are_what_staleness_and_concurrency_allow(
    max_head_offpolicyness, max_concurrent_rollouts, num_batches
):
    config = grp_config(
        rollout={
            "max_head_offpolicyness": max_head_offpolicyness,
            "max_concurrent_rollouts": max_concurrent_rollouts,
        }
    )
    assert prior_demand(config).num_batches == num_batches


def test_a_long_tail_weighs_less_when_steps_overlap():
    def rollout_s(staleness):
        config = grp_config(
            rollout={"max_head_offpolicyness": staleness, "max_concurrent_rollouts": 4096},
            planner={"min_rollout_gpus": 24, "min_train_gpus": 16, "allowed_train_tp": [4]},
            batch_size=64,
        )
        report = plan(config)
        return {
            o.train.num_gpus: o.estimate.rollout_s for o in (report.choice, *report.runners_up)
        }[16]

    assert rollout_s(3.0) < 0.6 * rollout_s(0.0)


def test_gpus_that_would_only_slow_rollout_down_stay_idle_and_that_is_said():
    config = grp_config(
        arch=msgspec.structs.replace(
            QWEN3_14B,
            num_attention_heads=48,
            num_key_value_heads=12,
            intermediate_size=17_664,
            vocab_size=153_600,
        ),
        planner={"allowed_rollout_tp": [1, 6], "prior_response_sigma": 1.2},
    )
    report = plan(config)
    assert set(report.choice.rollout_tps) == {6}
    assert report.notes[0].endswith("more instances on them would not shorten the step")


def test_gpus_that_no_instance_fits_into_stay_idle_and_that_is_said():
    report = plan(grp_config(num_gpus=36, planner={"allowed_rollout_tp": [8], "min_train_gpus": 8}))
    assert report.choice.train.num_gpus == 16
    assert report.notes == (
        "4 GPUs stay idle: the smallest instance has TP8, a node has 4 of them",
    )


def test_no_request_is_forgotten_where_they_do_not_divide_by_the_instances():
    config = grp_config(
        num_gpus=16,
        batch_size=5,
        training={"mini_batch_size": 5},
        planner={"allowed_rollout_tp": [4]},
    )
    blocks = plan(config).choice.estimate.rollout.blocks
    assert [block.num_requests for block in blocks] == [3, 3]


def test_a_step_longer_than_both_sides_says_what_is_added():
    on_policy = grp_config(rollout={"max_head_offpolicyness": 0.0})
    report = plan(on_policy)
    best = report.choice.estimate
    waits_s = best.step_s - max(best.train_s, best.rollout_s)
    assert waits_s > 1
    assert f" s) + {waits_s:.1f} s for stale samples and waiting; recompute" in render_plan(report)
    pinned_by_training = render_plan(plan(grp_config(num_gpus=16, max_new_tokens=512)))
    assert "waiting" not in pinned_by_training.partition("runners-up")[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training": {"train_tp_size": 5}}, "train_gpus 24 is not a multiple"),
        ({"rollout": {"rollout_gpus": 20}}, "use 24 GPUs, rollout_gpus is 20"),
        ({"planner": {"min_rollout_gpus": 25}}, "rollout_gpus 24 is below min_rollout_gpus 25"),
        ({"planner": {"min_train_gpus": 25}}, "train_gpus 24 is below min_train_gpus 25"),
    ],
)
def test_a_configured_split_that_contradicts_itself_is_infeasible(changes, said):
    planner = {"initial_allocation_strategy": "configured", **changes.pop("planner", {})}
    config = grp_config(planner=planner, **changes)
    buckets = [TpBucket(tp=8, count=3)]
    heterogeneous = msgspec.structs.replace(config.heterogeneous_rollout, instances=buckets)
    with pytest.raises(InfeasiblePlanError, match=said):
        plan(msgspec.structs.replace(config, heterogeneous_rollout=heterogeneous))


@pytest.mark.parametrize(
    ("options", "branch", "said"),
    [
        ({"planner": {"allowed_rollout_tp": [1, 16]}}, "rollout TP16", "a node has 8 GPUs"),
        ({"planner": {"allowed_rollout_tp": [1, 3]}}, "rollout TP3", "40 attention heads"),
        (
            {"planner": {"allowed_rollout_tp": [1, 8], "min_train_gpus": 44}},
            "rollout TP8",
            "4 GPUs may serve",
        ),
        (
            {"rollout": {"rollout_kv_cache_bytes": 2**30}},
            "rollout TP1",
            "the KV cache holds 6553 tokens, one sequence may have 18432",
        ),
        ({"planner": {"allowed_train_tp": [2, 3]}}, "TP3", "40 attention heads"),
        ({"planner": {"allowed_train_tp": [2, 64]}}, "TP64", "47 GPUs may train"),
    ],
)
def test_every_degree_that_cannot_exist_says_why(options, branch, said):
    planner = {"allocation_granularity_gpus": 1, **options.pop("planner", {})}
    found = reasons(plan(grp_config(planner=planner, batch_size=528, **options)))
    assert said in found[branch]


def test_demand_without_a_trajectory_is_a_bug():
    with pytest.raises(InvariantError, match="at least one finished trajectory"):
        observed_demand(grp_config(), [])
    with pytest.raises(InvariantError, match="1 prompts and 2 responses"):
        Demand(prompt_tokens=(1,), response_tokens=(1, 2), source="test")


def test_calibration_is_shown_with_its_evidence():
    book = observe(
        Calibration(hardware="NVIDIA A100-SXM4-80GB", model="Qwen3ForCausalLM"),
        Observation(operation="grpo_update", predicted=10.0, measured=12.0),
    )
    text = render_plan(plan(grp_config(), calibration=book), book)
    assert "grpo_update: x1.20 from 1 measurements, last prediction off by +20%" in text


def test_calibration_changes_the_plan_it_is_given_to():
    book = Calibration(hardware="", model="")
    for _ in range(3):
        slow = Observation(operation="grpo_update", predicted=10.0, measured=30.0)
        book = observe(book, slow)
    plain, slowed = plan(grp_config()), plan(grp_config(), calibration=book)
    assert slowed.choice.train.num_gpus >= plain.choice.train.num_gpus
    assert slowed.choice.estimate.train.total_s > 0
    assert slowed != plain


def test_a_long_list_of_branches_is_cut_in_text_but_not_in_the_report():
    report = plan(grp_config(num_gpus=48, planner={"allocation_granularity_gpus": 1}))
    shown = render_plan(report).split("left out")[1]
    assert len(report.pruned) > 40
    assert f"and {len(report.pruned) - 40} more; --json has all" in shown


def test_engines_that_get_every_third_version_leave_rollout_a_version_less():
    weights = {"sync_interval": 3}
    config = grp_config(rollout={"max_head_offpolicyness": 2.0, "max_concurrent_rollouts": 1536})
    rare = msgspec.structs.replace(
        config, weights=msgspec.structs.replace(config.weights, **weights)
    )
    assert plan(config).choice.estimate.pace.max_staleness == 2.0
    assert plan(rare).choice.estimate.pace.max_staleness == 1.0
