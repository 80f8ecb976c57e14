from math import inf
from pathlib import Path

import pytest

from config_files import config_from, problems_of, text_of, write_run
from libra.config.document import MapNode, parse_document
from libra.config.problems import Place
from libra.config.surface import all_options, flat_options, nested_sections, section_types
from libra.config.typed import Typed, to_config


def typed(text: str = "", **options: str) -> Typed:
    tree, problems = parse_document(text_of(text, **options), Place("a.yaml", 1, "/work"))
    assert not problems
    assert isinstance(tree, MapNode)
    return to_config(tree, home=None)


def only(text: str = "", **options: str) -> str:
    found = typed(text, **options).problems
    assert len(found) == 1, found
    return str(found[0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seed: '3'", "wants a whole number, got the text '3'; write a decimal number without"),
        ("seed: 1.0", "wants a whole number, got 1.0; write 1"),
        ("seed: true", "wants a whole number, got true"),
        ("seed: null", "wants a whole number, got null"),
        ("seed: [1]", "wants a whole number, got a list"),
        ("seed: -1", "must be at least 0, got -1; nearest: 0"),
        ("seed: 9223372036854775808", "does not fit in 64 bits"),
        ("learning_rate: '1.5'", "wants a number, got the text '1.5'; remove the quotes"),
        ("learning_rate: '1e-6'", "wants a number, got the text '1e-6'; remove the quotes"),
        ("learning_rate: 0", "must be more than 0, got 0.0"),
        ("learning_rate: .inf", "wants a finite number, got inf"),
        ("learning_rate: .nan", "wants a finite number, got nan"),
        ("max_head_offpolicyness: .nan", "wants a finite number, got nan"),
        ("max_head_offpolicyness: -.inf", "must be at least 0"),
        ("node_lease_s: 0.99", "must be at least 1, got 0.99; nearest: 1"),
        ("adam_beta1: 1", "must be less than 1, got 1.0"),
        ("gpu_memory_utilization: 1.5", "must be at most 1, got 1.5; nearest: 1"),
        ("shuffle: 1", "wants true or false, got 1"),
        ("run_name: 5", "wants text, got 5; write it in quotes"),
        ("run_name: null", "wants text, got null; write '' for none"),
        ("device: gpu", "wants one of auto, cpu, cuda, got 'gpu'"),
        ("device: cdua", "did you mean cuda?"),
        ("rollout_weight_sync_mode: null", "null is not the word none"),
        ("rollout_extra_args: --x", "wants a list, got the text"),
        ("rollout_extra_args: [1]", "rollout_extra_args[0]: wants text, got 1"),
        ("reward_args: [1]", "wants a mapping, got a list"),
        ("reward_args: {1: a}", "reward_args.1: argument names are text; write it in quotes"),
        ("reward_args: {a: [.nan]}", "reward_args.a[0]: not-a-number cannot be an argument"),
        ("api: null", "wants a mapping of options, got null"),
        ("api: {api_port: 65536}", "api.api_port: must be at most 65535"),
        (
            "heterogeneous_rollout: {instances: [{tp: 1}]}",
            "heterogeneous_rollout.instances[0].count: is required and not set",
        ),
        (
            "heterogeneous_rollout: {scheduling: {kv_capacity_tokens_by_tp: {a: 1}}}",
            "kv_capacity_tokens_by_tp.a: wants a whole number, got the text 'a'",
        ),
        (
            "heterogeneous_rollout: {scheduling: {kv_capacity_tokens_by_tp: 5}}",
            "kv_capacity_tokens_by_tp: wants a mapping, got 5",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_is_wanted(line: str, message: str):
    found = only(line)
    assert message in found
    assert found.startswith("a.yaml:6: ")


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "+1e-6", "0.000001"])
def test_a_number_may_have_any_of_its_usual_forms_where_a_float_is_wanted(text: str):
    assert config_from(f"learning_rate: {text}").training.learning_rate == 1e-6


def test_a_whole_number_is_taken_where_a_float_is_wanted():
    assert config_from("temperature: 2").rollout.temperature == 2.0
    assert isinstance(config_from("temperature: 2").rollout.temperature, float)


def test_infinity_is_taken_only_where_it_removes_a_bound():
    assert config_from("max_head_offpolicyness: .inf").rollout.max_head_offpolicyness == inf
    planner = config_from("").global_resource_planner
    assert planner.train_comm_compute_ratio_threshold == inf


def test_text_like_an_exponent_stays_text_in_arguments_and_is_warned_about():
    found = typed("reward_args: {scale: 1e-3, name: '1e-3'}")
    assert found.config.data.reward_args == {"scale": "1e-3", "name": "1e-3"}
    assert [warning.path for warning in found.warnings] == ["reward_args.scale"]


def test_arguments_of_user_code_hold_any_yaml_value():
    text = "workflow_args: {a: null, b: [1, 2.5, .inf], c: {d: yes}, e: 'x'}"
    assert config_from(text).data.workflow_args == {
        "a": None,
        "b": [1, 2.5, inf],
        "c": {"d": True},
        "e": "x",
    }


@pytest.mark.case("T-B04")
@pytest.mark.parametrize(
    ("line", "path", "hint"),
    [
        ("learing_rate: 1e-6", "learing_rate", "did you mean learning_rate?"),
        ("trainer: {learing_rate: 1}", "trainer.learing_rate", "did you mean learning_rate?"),
        (
            "global_resource_planner: {min_trian_gpus: 1}",
            "global_resource_planner.min_trian_gpus",
            "did you mean global_resource_planner.min_train_gpus",
        ),
        ("min_train_gpus: 1", "min_train_gpus", "global_resource_planner.min_train_gpus"),
        ("api_port: 1", "api_port", "it is written api.api_port"),
        (
            "load_metric: tokens",
            "load_metric",
            "it is written heterogeneous_rollout.scheduling.load_metric",
        ),
        (
            "heterogeneous_rollout: {load_metric: tokens}",
            "heterogeneous_rollout.load_metric",
            "it is written heterogeneous_rollout.scheduling.load_metric",
        ),
        ("training: {train_gpus: 2}", "training.train_gpus", "it is written train_gpus"),
        ("scheduling: {prefix_afinity: 1}", "scheduling.prefix_afinity", "prefix_affinity?"),
        ("zzzzqqqq: 1", "zzzzqqqq", ""),
        ("5: 1", "5", ""),
    ],
)
def test_an_unknown_key_is_named_in_full_with_the_one_that_was_meant(line, path, hint):
    problem = typed(line).problems[0]
    assert problem.path == path
    assert problem.what == "unknown option"
    assert hint in problem.hint


def test_every_planner_option_at_top_level_is_an_error_that_names_the_full_path():
    for field in section_types()["global_resource_planner"].fields:
        problem = typed(f"{field.name}: 1").problems[0]
        assert f"global_resource_planner.{field.name}" in problem.hint


def test_a_large_unknown_section_is_summed_up():
    lines = "\n".join(f"  k{n}: {n}" for n in range(50))
    found = typed(f"mystery:\n{lines}").problems
    assert len(found) == 21
    assert found[-1].what == "and 30 more unknown options below"


@pytest.mark.case("T-B04")
def test_all_problems_of_all_kinds_come_at_once(tmp_path: Path):
    text = (
        "seed: x\nlearing_rate: 1\nmax_new_tokens: 9999\n"
        "api: {api_port: -1}\nseed: 2\nmodel_path: nowhere\nsync_interval: 9\n"
        "heterogeneous_rollout: {instances: [{tp: 1, count: 5}]}"
    )
    found = problems_of(write_run(tmp_path, text), "save_interval=no", environ={"RANK": "0"})
    assert set(found) == {
        "seed",
        "learing_rate",
        "max_new_tokens",
        "api.api_port",
        "model_path",
        "max_head_offpolicyness",
        "heterogeneous_rollout.instances",
        "save_interval",
    }


def test_a_rule_is_not_judged_on_an_option_that_is_itself_wrong(tmp_path: Path):
    found = problems_of(write_run(tmp_path, "max_model_len: x\nmax_new_tokens: 5000"))
    assert list(found) == ["max_model_len"]


def test_a_missing_model_path_is_required_and_does_not_hide_the_rest():
    tree, _ = parse_document("batch_size: 3\nn_samples: 0", Place("a.yaml", 1))
    assert isinstance(tree, MapNode)
    assert [problem.path for problem in to_config(tree, home=None).problems] == [
        "model_path",
        "n_samples",
    ]


def test_flat_names_are_unique_and_no_section_is_named_like_one():
    names = [f.name for s in section_types() if s not in nested_sections()
             for f in section_types()[s].fields]  # fmt: skip
    assert len(names) == len(set(names))
    assert not set(flat_options()) & set(nested_sections())


def test_every_option_of_the_reference_page_has_its_name_place_and_default():
    defaults = {path: option.default for path, option in all_options().items()}
    for path, value in REFERENCE.items():
        assert path in defaults, path
        if value is not ...:
            assert defaults[path] == value, path


PLANNER = "global_resource_planner"
SCHEDULING = "heterogeneous_rollout.scheduling"
REFERENCE: dict[str, object] = {
    "model_path": ...,
    "tokenizer_path": "",
    "train_backend": "megatron_core",
    "train_gpus": ...,
    "rollout_gpus": ...,
    "train_tp_size": ...,
    "train_pp_size": ...,
    "train_cp_size": ...,
    "batch_size": ...,
    "n_samples": ...,
    "max_model_len": ...,
    "max_new_tokens": ...,
    "max_concurrent_rollouts": ...,
    "max_head_offpolicyness": ...,
    "recompute_logprobs": ...,
    "recompute_micro_batch_size": 1,
    f"{PLANNER}.memory_budget_check_enabled": ...,
    f"{PLANNER}.memory_budget_dry_run_enabled": ...,
    f"{PLANNER}.memory_budget_safety_margin_bytes": ...,
    f"{PLANNER}.memory_budget_logits_dtype_bytes": ...,
    f"{PLANNER}.memory_budget_workspace_factor": ...,
    "phase_trace_enabled": ...,
    "sync_interval": ...,
    "rollout_weight_sync_mode": "restart",
    "rollout_weight_reload_method": "inplace",
    "rollout_weight_reload_strategy": "parallel",
    "megatron_use_precision_aware_optimizer": ...,
    "megatron_optimizer_cpu_offload": ...,
    "megatron_optimizer_offload_fraction": ...,
    "megatron_use_cpu_initialization": ...,
    "megatron_grouped_gemm": ...,
    f"{PLANNER}.runtime_dynamic_reconfiguration_enabled": ...,
    f"{PLANNER}.initial_allocation_strategy": ...,
    f"{PLANNER}.allocation_granularity_gpus": ...,
    f"{PLANNER}.min_train_gpus": ...,
    f"{PLANNER}.min_rollout_gpus": ...,
    f"{PLANNER}.allowed_train_tp": ...,
    f"{PLANNER}.allowed_train_ep": ...,
    f"{PLANNER}.allowed_train_pp": ...,
    f"{PLANNER}.train_comm_compute_ratio_threshold": inf,
    f"{PLANNER}.train_ep_comm_compute_ratio_threshold": inf,
    f"{PLANNER}.train_pipeline_bubble_ratio_threshold": 0.30,
    f"{PLANNER}.runtime_online_replanning": ...,
    f"{PLANNER}.runtime_manage_rollout_processes": True,
    f"{PLANNER}.runtime_rollout_reconfigure_strategy": ...,
    f"{PLANNER}.runtime_cluster_swap_enabled": ...,
    f"{PLANNER}.runtime_reconfigure_training": ...,
    f"{PLANNER}.runtime_training_pool_plan_only": ...,
    f"{PLANNER}.decouple_communication_domains": ...,
    f"{PLANNER}.elastic_hybrid_replica_size_gpus": 0,
    f"{PLANNER}.elastic_hybrid_min_rollout_gpus": ...,
    f"{PLANNER}.elastic_hybrid_max_workers": None,
    f"{PLANNER}.runtime_batch_collection_timeout_s": ...,
    f"{PLANNER}.runtime_batch_collection_max_retries": ...,
    f"{PLANNER}.runtime_drain_before_reconfigure": ...,
    f"{SCHEDULING}.load_metric": "requests",
    f"{SCHEDULING}.kv_capacity_tokens_by_tp": {},
    f"{SCHEDULING}.kv_activation_reserve_gib": 4,
    f"{SCHEDULING}.load_balance_strategy": "least_connections",
    f"{SCHEDULING}.enable_metrics_feedback": False,
    f"{SCHEDULING}.metrics_poll_interval_s": 3,
    f"{SCHEDULING}.metrics_request_timeout_s": 1,
    f"{SCHEDULING}.metrics_staleness_ttl_s": 10,
    f"{SCHEDULING}.metrics_admission_enter": 0.90,
    f"{SCHEDULING}.metrics_admission_exit": 0.75,
    f"{SCHEDULING}.metrics_preemption_penalty_ttl_s": 60,
    f"{SCHEDULING}.metrics_bias_alpha": 0.3,
    f"{SCHEDULING}.shared_load_dir": "",
    f"{SCHEDULING}.shared_load_ttl_s": 30,
    f"{SCHEDULING}.shared_load_heartbeat_s": 10,
    f"{SCHEDULING}.shared_load_cache_ttl_s": 1,
    f"{SCHEDULING}.prefix_affinity": False,
    f"{SCHEDULING}.prefix_affinity_max_entries": 8192,
}
"""The names of the published option tables; `...` where they give no default."""


def test_problems_are_listed_in_the_order_of_the_file(tmp_path: Path):
    run = write_run(tmp_path, "zzz: 1\nseed: x\nmax_new_tokens: 9999\nkeep_last: 0")
    lines = [problem.place.line for problem in problems_of(run).values() if problem.place]
    assert lines == [6, 7, 8, 9]


def test_removing_quotes_is_suggested_only_where_it_helps():
    assert only("learning_rate: '1e-6'").endswith("remove the quotes")
    assert only("learning_rate: 1e").endswith("got the text '1e'")
