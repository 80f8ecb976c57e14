import pytest

from config_files import broken_rules, config_from, warnings_of
from libra.config.arithmetic import (
    batch_equation,
    nearest_divisors,
    nearest_multiples,
    rollout_buckets,
    staleness,
    steps_per_epoch,
)
from libra.config.model_arch import ModelArchConfig
from libra.config.problems import Problem
from libra.config.rollout import TpBucket
from libra.config.training import MegatronConfig

ARCH = (
    "model_arch: {architecture: Qwen2ForCausalLM, num_layers: 6, hidden_size: 384, "
    "num_attention_heads: 12, num_key_value_heads: 4, head_dim: 32, intermediate_size: 768, "
    "vocab_size: 512, max_position_embeddings: 8192}"
)
MOE = ARCH.replace("vocab_size", "num_experts: 6, moe_intermediate_size: 96, vocab_size")
HARDWARE = (
    "hardware: {device_name: x, memory_bytes: 1, dense_bf16_flops: 1, gpus_per_node: 8, "
    "memory_bandwidth_bytes_per_s: 1, intra_node_bandwidth_bytes_per_s: 1, "
    "inter_node_bandwidth_bytes_per_s: 1}"
)
SCHEDULING = "heterogeneous_rollout.scheduling"
PLANNER = "global_resource_planner"


def only(text: str = "", **options: str) -> Problem:
    found = broken_rules(text, **options)
    assert len(found) == 1, found
    return next(iter(found.values()))


def test_the_base_of_these_tests_breaks_nothing():
    assert not broken_rules()
    assert not broken_rules(ARCH)
    assert not warnings_of()


# Batch


@pytest.mark.case("T-B01")
def test_a_mini_batch_counts_samples_and_not_prompts():
    options = {"batch_size": "32", "n_samples": "4"}
    in_samples = batch_equation(config_from(**options, mini_batch_size="16"))
    assert (in_samples.prompts, in_samples.samples, in_samples.optimizer_steps) == (8, 32, 2)
    assert in_samples.samples_per_optimizer_step == 16
    assert not broken_rules(**options, mini_batch_size="16")
    # Read as prompts, 16 of them would be 64 samples: twice the batch.
    problem = only(**options, mini_batch_size="64")
    assert problem.path == "mini_batch_size"
    assert "32 samples (batch_size)" in problem.what


@pytest.mark.case("T-B02")
def test_a_batch_that_does_not_divide_over_ranks_lists_the_nearest_of_each_side():
    problem = only(batch_size="24", n_samples="4", train_gpus="5")
    assert problem.path == "batch_size"
    assert "24 samples does not divide over 5 data-parallel ranks x 1" in problem.what
    assert problem.hint == (
        "nearest: batch_size 20 or 40, or data-parallel size 4 or 6 (train_gpus 4 or 6)"
    )


def test_the_nearest_valid_sizes_are_valid():
    for batch_size in ("20", "40"):
        assert not broken_rules(batch_size=batch_size, n_samples="4", train_gpus="5")
    for train_gpus in ("4", "6"):
        assert not broken_rules(batch_size="24", n_samples="4", train_gpus=train_gpus)


def test_the_nearest_sizes_of_a_mini_batch_are_named_for_it():
    problem = only(batch_size="24", mini_batch_size="12", train_gpus="8", train_tp_size="1")
    assert problem.path == "mini_batch_size"
    assert "mini_batch_size 8 or 16" in problem.hint
    assert "(train_gpus 6 or 12)" in problem.hint


def test_a_mini_batch_below_one_pass_names_what_divides():
    problem = only(batch_size="8", micro_batch_size="3", train_gpus="2")
    assert problem.hint == "nearest: batch_size 12, or micro_batch_size 2 or 4"


def test_tensor_parallel_ranks_share_a_sample():
    assert not broken_rules(batch_size="8", train_gpus="4", train_tp_size="2", micro_batch_size="4")
    problem = only(batch_size="8", train_gpus="4", micro_batch_size="4", train_tp_size="1")
    assert "micro_batch_size 2" in problem.hint


@pytest.mark.case("T-B09")
def test_a_rollout_of_128_samples_and_a_mini_batch_of_64_are_two_steps():
    config = config_from(batch_size="128", n_samples="8", mini_batch_size="64")
    equation = batch_equation(config)
    assert (equation.prompts, equation.samples_per_prompt) == (16, 8)
    assert (equation.samples, equation.optimizer_steps) == (128, 2)
    assert "mini_batch_size" in broken_rules(batch_size="128", mini_batch_size="48")


def test_a_batch_holds_whole_groups():
    problem = only(batch_size="30", n_samples="8")
    assert problem.hint == "nearest: batch_size 24 or 32, or n_samples 6 or 10"


def test_an_equation_of_parts_is_an_error():
    with pytest.raises(ValueError, match="whole parts"):
        batch_equation(config_from(batch_size="30", n_samples="8"))


def test_steps_per_epoch_need_not_be_whole():
    assert steps_per_epoch(config_from(batch_size="32", n_samples="8"), rows=250) == 62.5


def test_recompute_cannot_take_more_than_a_ranks_share():
    problem = only(batch_size="8", train_gpus="2", recompute_micro_batch_size="5")
    assert problem.hint == "nearest: 4"


def test_something_must_stop_the_run():
    assert only(total_steps="null").path == "total_steps"
    assert not broken_rules(total_steps="null", epochs="1")
    assert not broken_rules(total_steps="null", max_run_s="60")


def test_a_decaying_learning_rate_has_an_end_after_its_warm_up():
    assert only(lr_schedule="cosine", total_steps="null", epochs="1").path == "lr_decay_steps"
    assert not broken_rules(lr_schedule="cosine", lr_warmup_steps="3")
    problem = only(lr_schedule="linear", lr_decay_steps="10", lr_warmup_steps="10")
    assert problem.hint == "at most 9"


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"clip_ratio_dual": "0.5"}, "clip_ratio_dual"),
        ({"clip_ratio_low": "1.2"}, "clip_ratio_low"),
        (
            {"importance_correction": "icepop", "importance_floor": "2", "importance_cap": "2"},
            "importance_floor",
        ),
        ({"n_samples": "1"}, "n_samples"),
    ],
)
def test_objectives_that_cannot_learn_are_refused(options: dict[str, str], path: str):
    assert only(**options).path == path


def test_a_correction_without_recomputed_logprobs_is_warned_about():
    assert "importance_correction" in warnings_of(recompute_logprobs="false")
    assert not warnings_of(recompute_logprobs="false", importance_correction="none")


# Parallelism and shape


def test_ranks_divide_into_whole_replicas():
    problem = only(train_gpus="6", train_tp_size="2", train_pp_size="2")
    assert problem.path == "train_gpus"
    assert problem.hint == "nearest: 4 or 8"


def test_expert_parallel_divides_experts_and_data_parallel_size():
    assert "no experts" in only(ARCH, train_gpus="2", train_ep_size="2").what
    assert not broken_rules(MOE, train_gpus="2", train_ep_size="2")
    assert "the experts, 6" in only(MOE, train_gpus="4", train_ep_size="4").what
    assert "data-parallel size, 4" in only(MOE, train_gpus="4", train_ep_size="3").what


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train_gpus": "8", "train_tp_size": "8"}, "8 does not divide the attention heads, 12"),
        ({"train_gpus": "6", "train_tp_size": "6"}, "6 neither divides nor is a multiple"),
        ({"train_gpus": "4", "train_pp_size": "4"}, "4 does not divide the layers, 6"),
    ],
)
def test_training_degrees_fit_the_model(options: dict[str, str], said: str):
    assert said in only(ARCH, **options).what


def test_key_value_heads_are_replicated_evenly():
    assert not broken_rules(ARCH, train_gpus="12", train_tp_size="12", batch_size="8")
    assert "MLP" in only(ARCH.replace("768", "770"), train_gpus="4", train_tp_size="4").what


def test_every_rollout_degree_fits_the_model():
    text = (
        f"{ARCH}\nheterogeneous_rollout: {{instances: [{{tp: 4, count: 1}}, {{tp: 5, count: 1}}]}}"
    )
    found = broken_rules(text, rollout_gpus="9")
    assert set(found) == {"heterogeneous_rollout.instances[1].tp"}
    three = ARCH.replace("num_key_value_heads: 4", "num_key_value_heads: 3")
    text = f"{three}\nheterogeneous_rollout: {{instances: [{{tp: 3, count: 1}}]}}"
    assert "vLLM's padded vocabulary, 512" in only(text, rollout_gpus="3").what


def test_sequence_parallel_needs_a_group():
    assert only(megatron_sequence_parallel="true").related == ("train_tp_size",)


def test_a_tensor_parallel_moe_splits_its_sequence_too():
    options = {"train_gpus": "2", "train_tp_size": "2"}
    assert only(MOE, **options).path == "megatron_sequence_parallel"
    assert not broken_rules(MOE, **options, megatron_sequence_parallel="true")


def test_a_precision_aware_optimizer_is_a_distributed_one():
    assert only(megatron_use_precision_aware_optimizer="true").related == (
        "megatron_use_distributed_optimizer",
    )


def test_a_head_that_cpu_attention_lacks_is_the_installed_stacks_limit():
    text = ARCH.replace("head_dim: 32", "head_dim: 16")
    assert "installed stack cannot" in only(text, device="cpu").what
    assert not broken_rules(text, device="cuda")


# Rollout


def test_a_response_leaves_room_for_a_prompt():
    problem = only(max_model_len="64", max_new_tokens="64")
    assert (problem.path, problem.hint) == ("max_new_tokens", "at most 63")


def test_the_context_stays_within_the_models_positions():
    assert only(ARCH, max_model_len="9000").hint == "at most 8192"


def test_the_cache_holds_one_sequence():
    options = {"device": "cpu", "train_dtype": "float32", "max_model_len": "8192"}
    # 2 x 6 layers x 4 heads x 32 x 4 bytes = 6144 bytes a token; 64 MiB hold 10922.
    assert not broken_rules(ARCH, **options)
    assert not broken_rules(ARCH, **options, rollout_kv_cache_bytes=str(6144 * 8192))
    problem = only(ARCH, **options, rollout_kv_cache_bytes=str(6144 * 8192 - 1))
    assert problem.hint == "at least 50331648, or a max_model_len of at most 8191"


def test_staleness_counts_whole_versions():
    assert only(max_head_offpolicyness="1.5").hint == "nearest: 1 or 2, or .inf for no bound"
    assert not broken_rules(max_head_offpolicyness="0")


def test_staleness_covers_the_sync_interval():
    problem = only(sync_interval="4", max_head_offpolicyness="2")
    assert problem.hint == "at least 3, or a sync_interval of at most 3"
    assert not broken_rules(sync_interval="4", max_head_offpolicyness="3")


def test_engines_that_never_sync_need_unbounded_staleness_and_are_warned_about():
    options = {"rollout_weight_sync_mode": "none"}
    assert only(**options).hint == "write .inf"
    assert not broken_rules(**options, max_head_offpolicyness=".inf")
    assert "rollout_weight_sync_mode" in warnings_of(**options, max_head_offpolicyness=".inf")


@pytest.mark.parametrize(
    ("bound", "interval", "versions", "trajectories"),
    [
        ("0", "1", 1, 8),
        ("1", "1", 2, 16),
        ("3", "2", 2, 32),
        ("4", "2", 3, 40),
        ("99", "1", 100, 50),
    ],
)
def test_what_is_in_flight_is_bounded(bound, interval, versions, trajectories):
    config = config_from(
        max_head_offpolicyness=bound, sync_interval=interval, max_concurrent_rollouts="50"
    )
    found = staleness(config)
    assert (found.max_policy_versions, found.max_trajectories) == (versions, trajectories)


def test_a_whole_group_can_be_admitted():
    assert only(max_concurrent_rollouts="3").hint == "nearest: 4"


def test_pinned_instances_use_every_rollout_gpu():
    text = "heterogeneous_rollout: {instances: [{tp: 1, count: 4}, {tp: 4, count: 2}]}"
    assert not broken_rules(text, rollout_gpus="12")
    problem = only(text, rollout_gpus="8")
    assert problem.what == "4 x TP 1 + 2 x TP 4 use 12 GPUs, not rollout_gpus, 8"
    assert rollout_buckets(config_from(text)) == (TpBucket(tp=1, count=4), TpBucket(tp=4, count=2))
    assert rollout_buckets(config_from(rollout_gpus="3")) == (TpBucket(tp=1, count=3),)


def test_the_planner_is_not_asked_to_choose_what_is_pinned():
    text = (
        "heterogeneous_rollout: {instances: [{tp: 1, count: 1}]}\n"
        f"{PLANNER}: {{initial_allocation_strategy: grp}}"
    )
    assert only(text).path == "heterogeneous_rollout.instances"


def test_the_planners_budget_need_not_divide_the_batch():
    text = f"{PLANNER}: {{initial_allocation_strategy: grp}}"
    assert not broken_rules(text, train_gpus="7")
    assert batch_equation(config_from(text, train_gpus="7")).data_parallel_size is None


def test_servers_are_ours_or_somebody_elses():
    unmanaged = f"{PLANNER}: {{runtime_manage_rollout_processes: false}}\n"
    endpoints = "heterogeneous_rollout: {endpoints: [{url: 'http://a:1'}]}"
    assert not broken_rules(unmanaged + endpoints)
    assert only(unmanaged).path == "heterogeneous_rollout.endpoints"
    assert only(endpoints).path == "heterogeneous_rollout.endpoints"
    assert "rollout_gpus" in broken_rules(rollout_gpus="0")


@pytest.mark.parametrize(
    ("more", "options", "path"),
    [
        ("", {"rollout_weight_reload_method": "restart"}, "rollout_weight_reload_method"),
        (", initial_allocation_strategy: grp", {}, f"{PLANNER}.initial_allocation_strategy"),
        (
            ", runtime_dynamic_reconfiguration_enabled: true",
            {},
            f"{PLANNER}.runtime_dynamic_reconfiguration_enabled",
        ),
    ],
)
def test_servers_of_others_are_neither_replaced_nor_chosen(more: str, options: dict, path: str):
    text = (
        f"{PLANNER}: {{runtime_manage_rollout_processes: false{more}}}\n"
        "heterogeneous_rollout: {endpoints: [{url: 'http://a:1'}]}"
    )
    assert only(text, **options).path == path


@pytest.mark.parametrize("url", ["a:1", "http://a", "ftp://a:1", "http://a:1/v1", "http://a b:1"])
def test_an_endpoint_is_the_root_of_a_server(url: str):
    text = (
        f"{PLANNER}: {{runtime_manage_rollout_processes: false}}\n"
        f"heterogeneous_rollout: {{endpoints: [{{url: '{url}'}}]}}"
    )
    assert "http://host:port" in only(text).what


def test_an_endpoint_is_named_once():
    text = (
        f"{PLANNER}: {{runtime_manage_rollout_processes: false}}\n"
        "heterogeneous_rollout: {endpoints: [{url: 'http://[::1]:1'}, {url: 'http://[::1]:1/'}]}"
    )
    assert "named twice" in only(text).what


def test_ports_do_not_overlap_or_run_out():
    assert only("api: {api_port: 8003}", rollout_port_base="8000", rollout_gpus="4").path == (
        "api.api_port"
    )
    assert not broken_rules("api: {api_port: 8004}", rollout_port_base="8000", rollout_gpus="4")
    assert not broken_rules("api: {api_port: 0}", rollout_port_base="0", rollout_gpus="4")
    assert only(rollout_port_base="65534", rollout_gpus="3").hint == "at most 65533"


def test_code_is_named_by_a_word_or_module_and_function():
    assert not broken_rules(workflow="my.package:run", reward="exact_match")
    for name in ("a:b:c", "a.b", "my module:f", "''", "../x:f"):
        assert only(reward=name).path == "reward"


def test_a_run_name_fits_a_directory():
    assert not broken_rules(run_name="übung-1")
    for name in ("a/b", ".hidden", '"a\\nb"'):
        assert only(run_name=name).path == "run_name"


# Scheduling and supervision


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (
            "heterogeneous_rollout: {scheduling: {metrics_admission_enter: 0.7}}",
            f"{SCHEDULING}.metrics_admission_enter",
        ),
        (
            "heterogeneous_rollout: {scheduling: {metrics_admission_exit: 0.9}}",
            f"{SCHEDULING}.metrics_admission_enter",
        ),
        (
            "heterogeneous_rollout: {scheduling: {shared_load_heartbeat_s: 30}}",
            f"{SCHEDULING}.shared_load_ttl_s",
        ),
        (
            "heterogeneous_rollout: {scheduling: {metrics_poll_interval_s: 10}}",
            f"{SCHEDULING}.metrics_staleness_ttl_s",
        ),
        ("supervision: {restart_backoff_max_s: 0.5}", "supervision.restart_backoff_max_s"),
    ],
)
def test_pairs_are_in_order(text: str, path: str):
    assert only(text).path == path


# Planner


def test_minima_fit_what_there_is():
    assert only(f"{PLANNER}: {{min_train_gpus: 3}}", train_gpus="2").hint == "nearest: 2"
    assert only(f"{PLANNER}: {{min_rollout_gpus: 2}}").path == f"{PLANNER}.min_rollout_gpus"
    grp = f"{PLANNER}: {{initial_allocation_strategy: grp, min_train_gpus: 3, min_rollout_gpus: 2}}"
    assert not broken_rules(grp, train_gpus="4", rollout_gpus="1")
    assert "exceed the budget of 4" in only(grp, train_gpus="2", rollout_gpus="2").what


def test_granularity_splits_the_budget():
    grp = f"{PLANNER}: {{initial_allocation_strategy: grp, allocation_granularity_gpus: 8}}"
    assert not broken_rules(grp, train_gpus="8", rollout_gpus="8")
    assert only(grp, train_gpus="8", rollout_gpus="4").hint == "nearest: 6"


def test_a_minimum_that_leaves_no_replica_any_room_is_warned_of():
    text = f"{PLANNER}: {{runtime_dynamic_reconfiguration_enabled: true, "
    text += "runtime_reconfigure_training: true, elastic_hybrid_min_rollout_gpus: %d}"
    path = f"{PLANNER}.elastic_hybrid_min_rollout_gpus"
    gpus = {"train_gpus": "1", "rollout_gpus": "2"}
    assert path in warnings_of(text % 2, **gpus)
    assert path not in warnings_of(text % 1, **gpus)


def test_the_last_server_is_lent_only_with_trajectories_to_go_on_with():
    lends = (
        f"{PLANNER}: {{runtime_dynamic_reconfiguration_enabled: true, "
        "runtime_reconfigure_training: true, elastic_hybrid_min_rollout_gpus: 0"
    )
    found = only(f"{lends}}}", max_head_offpolicyness="1")
    assert found.path == f"{PLANNER}.elastic_hybrid_min_rollout_gpus"
    assert "lasts for max_head_offpolicyness, 1, steps, and a replica needs 2" in found.what
    assert not broken_rules(f"{lends}}}", max_head_offpolicyness="2")
    alone = only(f"{lends}, decouple_communication_domains: false}}", max_head_offpolicyness="8")
    assert "then there are no replicas" in alone.what
    # Nothing is lent at all.
    assert not broken_rules(f"{PLANNER}: {{elastic_hybrid_min_rollout_gpus: 0}}")


def test_a_hybrid_replica_is_one_of_the_training_topology():
    text = f"{PLANNER}: {{elastic_hybrid_replica_size_gpus: %d}}"
    assert not broken_rules(text % 2, train_gpus="4", train_tp_size="2")
    assert not broken_rules(text % 0, train_gpus="4", train_tp_size="2")
    assert only(text % 4, train_gpus="4", train_tp_size="2").hint == "write 2, or 0 to derive it"


def test_expert_candidates_divide_the_experts():
    text = f"{PLANNER}: {{allowed_train_ep: [1, 2, 4]}}"
    assert only(f"{MOE}\n{text}").path == f"{PLANNER}.allowed_train_ep[2]"
    assert len(broken_rules(f"{ARCH}\n{text}")) == 2


@pytest.mark.parametrize(
    "name", ["runtime_online_replanning", "runtime_cluster_swap_enabled",
             "runtime_reconfigure_training", "runtime_training_pool_plan_only"],
)  # fmt: skip
def test_nothing_elastic_is_on_without_the_master_switch(name: str):
    assert only(f"{PLANNER}: {{{name}: true}}").path == f"{PLANNER}.{name}"
    on = f"{PLANNER}: {{runtime_dynamic_reconfiguration_enabled: true, {name}: true}}"
    assert not broken_rules(f"{HARDWARE}\n{on}")


def test_online_replanning_needs_hardware_to_price():
    on = (
        f"{PLANNER}: {{runtime_dynamic_reconfiguration_enabled: true, "
        "runtime_online_replanning: true}"
    )
    problem = only(on)
    assert problem.path == f"{PLANNER}.runtime_online_replanning"
    assert "no plan can be priced" in problem.what
    assert not broken_rules(f"{HARDWARE}\n{on}")


def test_cluster_swap_needs_its_switch():
    text = f"{PLANNER}: {{runtime_rollout_reconfigure_strategy: cluster_swap}}"
    assert only(text).related == (f"{PLANNER}.runtime_cluster_swap_enabled",)


LENT = f"""
{PLANNER}:
  runtime_dynamic_reconfiguration_enabled: true
  runtime_reconfigure_training: true
  runtime_lent_servers: sleep
"""


@pytest.mark.parametrize(
    ("changed", "options", "other"),
    [
        ("runtime_reconfigure_training: false", {}, f"{PLANNER}.runtime_reconfigure_training"),
        (
            "runtime_rollout_reconfigure_strategy: restart_all",
            {},
            f"{PLANNER}.runtime_rollout_reconfigure_strategy",
        ),
        (
            "runtime_rollout_reconfigure_strategy: blue_green",
            {},
            f"{PLANNER}.runtime_rollout_reconfigure_strategy",
        ),
        (
            "",
            {"rollout_weight_sync_mode": "none", "max_head_offpolicyness": ".inf"},
            "rollout_weight_sync_mode",
        ),
        ("", {"rollout_weight_reload_method": "restart"}, "rollout_weight_reload_method"),
    ],
)
def test_servers_sleep_only_where_they_are_of_use_afterwards(changed, options, other):
    assert not broken_rules(LENT)
    lines = [it for it in LENT.splitlines() if it.split(":")[0] != f"  {changed.split(':')[0]}"]
    text = "\n".join([*lines, *([f"  {changed}"] if changed else [])])
    problem = only(text, **options)
    assert problem.path == f"{PLANNER}.runtime_lent_servers"
    assert problem.related == (other,)
    assert not broken_rules(text.replace("sleep", "stop"), **options)


def test_the_cluster_holds_what_is_used():
    text = (
        "hardware: {device_name: x, memory_bytes: 1, dense_bf16_flops: 1, gpus_per_node: 4, "
        "memory_bandwidth_bytes_per_s: 1, intra_node_bandwidth_bytes_per_s: 1, "
        "inter_node_bandwidth_bytes_per_s: 1}"
    )
    assert not broken_rules(text, train_gpus="2", rollout_gpus="2", batch_size="8")
    assert only(text, train_gpus="4", rollout_gpus="4").hint == "at least 2 nodes"
    assert not broken_rules(text, train_gpus="4", rollout_gpus="4", device="cpu")


# Options of other choices


@pytest.mark.case("T-B04")
@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("train_backend: fsdp\nmegatron_use_distributed_optimizer: true",
         "megatron_use_distributed_optimizer"),
        ("train_backend: fsdp\ntrain_gpus: 2\ntrain_pp_size: 2", "train_pp_size"),
        ("fsdp_gradient_checkpointing: true", "fsdp_gradient_checkpointing"),
        ("train_backend: fsdp\nglobal_resource_planner: {initial_allocation_strategy: grp}",
         "global_resource_planner.initial_allocation_strategy"),
        ("heterogeneous_rollout: {scheduling: {load_balance_weights: {tp1: 2}}}",
         f"{SCHEDULING}.load_balance_weights"),
        ("heterogeneous_rollout: {scheduling: {kv_capacity_tokens_by_tp: {1: 9}}}",
         f"{SCHEDULING}.kv_capacity_tokens_by_tp"),
        (("heterogeneous_rollout: {scheduling: {load_balance_strategy: round_robin, "
         "load_metric: tokens}}"), f"{SCHEDULING}.load_metric"),
        ("lr_decay_steps: 5", "lr_decay_steps"),
        ("eval_data: d.jsonl\nrollout_weight_sync_mode: none\nmax_head_offpolicyness: .inf",
         "eval_data"),
        ("megatron_optimizer_offload_fraction: 0.5", "megatron_optimizer_offload_fraction"),
    ],
)  # fmt: skip
def test_an_option_of_another_choice_is_refused(text: str, path: str):
    problem = only(text)
    assert problem.path == path
    assert "has an effect only with" in problem.what


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("heterogeneous_rollout: {scheduling: {metrics_bias_alpha: 0.5}}",
         f"{SCHEDULING}.metrics_bias_alpha"),
        ("heterogeneous_rollout: {scheduling: {prefix_affinity_max_entries: 5}}",
         f"{SCHEDULING}.prefix_affinity_max_entries"),
        ("heterogeneous_rollout: {scheduling: {shared_load_cache_ttl_s: 0.5}}",
         f"{SCHEDULING}.shared_load_cache_ttl_s"),
        ("kl_estimator: k1", "kl_estimator"),
        ("kl_unbiased: true", "kl_unbiased"),
        ("eval_interval: 5", "eval_interval"),
        ("api: {api_host: '0.0.0.0'}", "api.api_host"),
        (("global_resource_planner: {initial_allocation_strategy: grp}\ntrain_gpus: 2\n"
         "train_tp_size: 2"), "train_tp_size"),
        ("global_resource_planner: {elastic_hybrid_max_workers: 0}",
         f"{PLANNER}.elastic_hybrid_max_workers"),
    ],
)  # fmt: skip
def test_a_tunable_of_what_is_off_is_warned_about(text: str, path: str):
    assert path in warnings_of(text)
    assert not broken_rules(text)


@pytest.mark.parametrize("value", range(1, 40))
def test_nearest_values_surround_and_divide(value: int):
    assert all(n % 6 == 0 and abs(n - value) <= 6 for n in nearest_multiples(value, 6))
    divisors = nearest_divisors(value, 36)
    assert all(36 % n == 0 for n in divisors)
    assert (value in divisors) == (36 % value == 0)


def test_a_shape_is_a_struct_that_rules_can_build_on():
    arch = config_from(ARCH).model_arch
    assert isinstance(arch, ModelArchConfig)
    assert arch.num_experts == 0


def test_the_nearest_sizes_of_an_enormous_batch_take_no_time():
    assert nearest_divisors(7, 9 * 10**18) == (6, 8)
    assert nearest_divisors(8, 2**61 - 1) == (1, 2**61 - 1)


@pytest.mark.parametrize(
    "option", ["rollout_weight_reload_method: restart", "rollout_weight_reload_strategy: serial"]
)
def test_a_transfer_reaches_all_servers_at_once_in_the_processes_that_serve(option: str):
    problem = only(f"rollout_weight_sync_mode: nccl\n{option}")
    assert problem.path == option.partition(":")[0]
    assert "only with rollout_weight_sync_mode not nccl" in problem.what
    assert not broken_rules("rollout_weight_sync_mode: nccl")
    assert not broken_rules(option)


def test_the_backend_of_transfers_is_ours():
    flag = "--weight-transfer-config={}"
    problem = only(f'rollout_extra_args: ["{flag}"]')
    assert "--weight-transfer-config is set by the run itself" in problem.what


@pytest.mark.parametrize(
    ("text", "place"), [("nodes: [a, b]", ""), ("sync_interval: 1", "shared_load_dir: /s, ")]
)
def test_tunables_of_a_load_that_is_shared_are_not_warned_about(text: str, place: str):
    scheduling = f"{{{place}shared_load_ttl_s: 20}}"
    assert not warnings_of(f"{text}\nheterogeneous_rollout: {{scheduling: {scheduling}}}")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("rollout_weight_sync_mode: none\nmax_head_offpolicyness: .inf\nsync_interval: 3",
         "sync_interval"),
        (("rollout_weight_sync_mode: none\nmax_head_offpolicyness: .inf\n"
         "rollout_weight_reload_strategy: serial"), "rollout_weight_reload_strategy"),
        ("importance_floor: 0.1", "importance_floor"),
        (("rollout_gpus: 3\nheterogeneous_rollout: {instances: [{tp: 1, count: 1}, "
         "{tp: 2, count: 1}], scheduling: {load_metric: kv_tokens, "
         "kv_capacity_tokens_by_tp: {2: 9}}}"), f"{SCHEDULING}.kv_capacity_tokens_by_tp"),
    ],
)  # fmt: skip
def test_what_the_rest_makes_useless_is_warned_about(text: str, path: str):
    assert path in warnings_of(text)
    assert not broken_rules(text)


def test_a_pause_mode_is_of_the_inplace_method():
    options = {"rollout_weight_reload_method": "restart", "rollout_weight_pause_mode": "abort"}
    assert only(**options).path == "rollout_weight_pause_mode"


def test_capacities_of_other_degrees_would_leave_every_instance_out():
    text = (
        "heterogeneous_rollout: {scheduling: {load_metric: kv_tokens, "
        "kv_capacity_tokens_by_tp: {4: 9}}}"
    )
    assert only(text).path == f"{SCHEDULING}.kv_capacity_tokens_by_tp"


def test_a_warm_up_ends_before_a_decay_derived_from_total_steps():
    problem = only(lr_schedule="cosine", total_steps="5", lr_warmup_steps="5")
    assert (problem.path, problem.hint) == ("lr_warmup_steps", "at most 4")
    halves = {"lr_schedule": "cosine", "total_steps": "5", "mini_batch_size": "4"}
    assert not broken_rules(**halves, lr_warmup_steps="9")


def test_offloading_none_of_the_optimizer_is_no_offloading():
    problem = only(megatron_optimizer_cpu_offload="true", megatron_optimizer_offload_fraction="0")
    assert problem.related == ("megatron_optimizer_offload_fraction",)
    assert not broken_rules(megatron_optimizer_cpu_offload="true")
    assert config_from(megatron_optimizer_cpu_offload="true").megatron == MegatronConfig(
        megatron_optimizer_cpu_offload=True, megatron_optimizer_offload_fraction=1.0
    )


def test_a_weight_belongs_to_an_instance_or_a_degree_of_the_run():
    options = "load_balance_strategy: weighted, load_balance_weights: {NAME: 2}"
    text = "heterogeneous_rollout: {instances: [{tp: 1, count: 2}], scheduling: {" + options + "}}"
    for name in ("vllm-1", "tp1"):
        assert not broken_rules(text.replace("NAME", name), rollout_gpus="2")
    for name in ("vllm-2", "tp2", "nonsense"):
        problem = only(text.replace("NAME", name), rollout_gpus="2")
        assert (problem.path, problem.hint) == (
            f"{SCHEDULING}.load_balance_weights",
            "one of tp1, vllm-0, vllm-1",
        )


@pytest.mark.parametrize("argument", ["--port", "--port=1", "--max_model_len", "-tp"])
def test_extra_arguments_that_would_undo_the_runs_own_are_refused(argument: str):
    problem = only(rollout_extra_args=f"['{argument}', '5']")
    assert problem.path == "rollout_extra_args"
    assert problem.hint.startswith("set ")
    assert not broken_rules(rollout_extra_args="['--block-size', '16']")


def test_a_run_name_leaves_room_for_the_time():
    assert only(run_name="é" * 101).path == "run_name"
    assert not broken_rules(run_name="é" * 100)


def test_the_planner_chooses_the_micro_batch():
    text = "global_resource_planner: {initial_allocation_strategy: grp}"
    equation = batch_equation(config_from(text, micro_batch_size="3"))
    assert equation.micro_batches_per_rank is None
