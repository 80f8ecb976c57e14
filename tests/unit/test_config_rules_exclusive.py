import pytest

from config_files import broken_rules, only_problem, warnings_of

SCHEDULING = "heterogeneous_rollout.scheduling"
PLANNER = "global_resource_planner"


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
        ("policy_loss: cispo\nclip_ratio_dual: 3", "clip_ratio_dual"),
        ("policy_loss: cispo\nclip_ratio_low: 0.1", "clip_ratio_low"),
        ("advantage: dr_grpo\nadvantage_eps: 0.1", "advantage_eps"),
        ("advantage: rloo\nadvantage_eps: 0.1", "advantage_eps"),
        ("advantage: maxrl\nadvantage_eps: 0.1", "advantage_eps"),
    ],
)  # fmt: skip
def test_an_option_of_another_choice_is_refused(text: str, path: str):
    problem = only_problem(text)
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


@pytest.mark.parametrize(
    "text",
    [
        "policy_loss: cispo\nclip_ratio_high: 0.5",
        "policy_loss: gspo\nclip_ratio_low: 0.1\nclip_ratio_dual: 3",
        *(f"advantage: {name}\nadvantage_eps: 0.1" for name in ("grpo_population_std", "loo_std")),
    ],
)
def test_what_an_objective_reads_may_be_set(text: str):
    assert not broken_rules(text)


@pytest.mark.parametrize(
    "option", ["rollout_weight_reload_method: restart", "rollout_weight_reload_strategy: serial"]
)
def test_a_transfer_reaches_all_servers_at_once_in_the_processes_that_serve(option: str):
    problem = only_problem(f"rollout_weight_sync_mode: nccl\n{option}")
    assert problem.path == option.partition(":")[0]
    assert "only with rollout_weight_sync_mode not nccl" in problem.what
    assert not broken_rules("rollout_weight_sync_mode: nccl")
    assert not broken_rules(option)


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
    assert only_problem(**options).path == "rollout_weight_pause_mode"
