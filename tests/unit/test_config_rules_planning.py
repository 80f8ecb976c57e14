import pytest

from config_files import ARCH, MOE, broken_rules, only_problem, warnings_of

HARDWARE = (
    "hardware: {device_name: x, memory_bytes: 1, dense_bf16_flops: 1, gpus_per_node: 8, "
    "memory_bandwidth_bytes_per_s: 1, intra_node_bandwidth_bytes_per_s: 1, "
    "inter_node_bandwidth_bytes_per_s: 1}"
)
PLANNER = "global_resource_planner"


def test_the_planner_is_not_asked_to_choose_what_is_pinned():
    text = (
        "heterogeneous_rollout: {instances: [{tp: 1, count: 1}]}\n"
        f"{PLANNER}: {{initial_allocation_strategy: grp}}"
    )
    assert only_problem(text).path == "heterogeneous_rollout.instances"


def test_minima_fit_what_there_is():
    assert only_problem(f"{PLANNER}: {{min_train_gpus: 3}}", train_gpus="2").hint == "nearest: 2"
    assert only_problem(f"{PLANNER}: {{min_rollout_gpus: 2}}").path == f"{PLANNER}.min_rollout_gpus"
    grp = f"{PLANNER}: {{initial_allocation_strategy: grp, min_train_gpus: 3, min_rollout_gpus: 2}}"
    assert not broken_rules(grp, train_gpus="4", rollout_gpus="1")
    assert "exceed the budget of 4" in only_problem(grp, train_gpus="2", rollout_gpus="2").what


def test_granularity_splits_the_budget():
    grp = f"{PLANNER}: {{initial_allocation_strategy: grp, allocation_granularity_gpus: 8}}"
    assert not broken_rules(grp, train_gpus="8", rollout_gpus="8")
    assert only_problem(grp, train_gpus="8", rollout_gpus="4").hint == "nearest: 6"


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
    found = only_problem(f"{lends}}}", max_head_offpolicyness="1")
    assert found.path == f"{PLANNER}.elastic_hybrid_min_rollout_gpus"
    assert "lasts for max_head_offpolicyness, 1, steps, and a replica needs 2" in found.what
    assert not broken_rules(f"{lends}}}", max_head_offpolicyness="2")
    alone = only_problem(
        f"{lends}, decouple_communication_domains: false}}", max_head_offpolicyness="8"
    )
    assert "then there are no replicas" in alone.what
    # Nothing is lent at all.
    assert not broken_rules(f"{PLANNER}: {{elastic_hybrid_min_rollout_gpus: 0}}")


def test_a_hybrid_replica_is_one_of_the_training_topology():
    text = f"{PLANNER}: {{elastic_hybrid_replica_size_gpus: %d}}"
    assert not broken_rules(text % 2, train_gpus="4", train_tp_size="2")
    assert not broken_rules(text % 0, train_gpus="4", train_tp_size="2")
    assert (
        only_problem(text % 4, train_gpus="4", train_tp_size="2").hint
        == "write 2, or 0 to derive it"
    )


def test_expert_candidates_divide_the_experts():
    text = f"{PLANNER}: {{allowed_train_ep: [1, 2, 4]}}"
    assert only_problem(f"{MOE}\n{text}").path == f"{PLANNER}.allowed_train_ep[2]"
    assert len(broken_rules(f"{ARCH}\n{text}")) == 2


@pytest.mark.parametrize(
    "name", ["runtime_online_replanning", "runtime_cluster_swap_enabled",
             "runtime_reconfigure_training", "runtime_training_pool_plan_only"],
)  # fmt: skip
def test_nothing_elastic_is_on_without_the_master_switch(name: str):
    assert only_problem(f"{PLANNER}: {{{name}: true}}").path == f"{PLANNER}.{name}"
    on = f"{PLANNER}: {{runtime_dynamic_reconfiguration_enabled: true, {name}: true}}"
    assert not broken_rules(f"{HARDWARE}\n{on}")


def test_online_replanning_needs_hardware_to_price():
    on = (
        f"{PLANNER}: {{runtime_dynamic_reconfiguration_enabled: true, "
        "runtime_online_replanning: true}"
    )
    problem = only_problem(on)
    assert problem.path == f"{PLANNER}.runtime_online_replanning"
    assert "no plan can be priced" in problem.what
    assert not broken_rules(f"{HARDWARE}\n{on}")


def test_cluster_swap_needs_its_switch():
    text = f"{PLANNER}: {{runtime_rollout_reconfigure_strategy: cluster_swap}}"
    assert only_problem(text).related == (f"{PLANNER}.runtime_cluster_swap_enabled",)


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
    problem = only_problem(text, **options)
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
    assert only_problem(text, train_gpus="4", rollout_gpus="4").hint == "at least 2 nodes"
    assert not broken_rules(text, train_gpus="4", rollout_gpus="4", device="cpu")
