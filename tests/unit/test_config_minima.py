"""Minima that no plan of the run can keep."""

from config_files import broken_rules, warnings_of
from libra.config.problems import Problem

PLANNER = "global_resource_planner"
BESIDE_REPLICAS = f"{PLANNER}.elastic_hybrid_min_rollout_gpus"
ENDPOINTS = (
    "heterogeneous_rollout: {endpoints: [{url: 'http://a:1', tp: 2}, {url: 'http://b:1', tp: 1}]}"
)
HARDWARE = (
    "hardware: {device_name: x, memory_bytes: 1, dense_bf16_flops: 1, gpus_per_node: 4, nodes: 2, "
    "memory_bandwidth_bytes_per_s: 1, intra_node_bandwidth_bytes_per_s: 1, "
    "inter_node_bandwidth_bytes_per_s: 1}"
)


def planner(**options: object) -> str:
    """YAML of a run whose plan may change on both sides."""
    on = {"runtime_dynamic_reconfiguration_enabled": "true", "runtime_reconfigure_training": "true"}
    return f"{PLANNER}: {{{', '.join(f'{k}: {v}' for k, v in {**on, **options}.items())}}}"


def only(text: str, **options: str) -> Problem:
    [found] = broken_rules(text, **options).values()
    return found


def test_rollout_is_not_asked_to_keep_more_beside_replicas_than_it_can_ever_have():
    gpus = {"train_gpus": "1", "rollout_gpus": "2"}
    found = only(planner(elastic_hybrid_min_rollout_gpus=3), **gpus)
    assert found.path == BESIDE_REPLICAS
    assert found.what == (
        "3 is more than rollout can ever have, 2: train_gpus + rollout_gpus is 3, min_train_gpus 1"
    )
    assert found.hint == "nearest: 2"
    # All of it may be kept: then nothing is lent, which is a warning at most.
    text = planner(elastic_hybrid_min_rollout_gpus=2)
    assert not broken_rules(text, **gpus)
    assert BESIDE_REPLICAS in warnings_of(text, **gpus)
    # What the core can give up counts too.
    text = planner(elastic_hybrid_min_rollout_gpus=3)
    assert not broken_rules(text, train_gpus="2", rollout_gpus="2")
    found = only(
        planner(elastic_hybrid_min_rollout_gpus=3, min_train_gpus=2),
        train_gpus="2",
        rollout_gpus="2",
    )
    assert "min_train_gpus 2" in found.what


def test_devices_that_only_an_order_may_name_count_where_they_are_described():
    gpus = {"train_gpus": "1", "rollout_gpus": "2"}
    text = planner(elastic_hybrid_min_rollout_gpus=7)
    assert not broken_rules(f"{text}\n{HARDWARE}", **gpus)
    found = only(f"{planner(elastic_hybrid_min_rollout_gpus=8)}\n{HARDWARE}", **gpus)
    assert "hardware.nodes x hardware.gpus_per_node is 8" in found.what


def test_what_rollout_keeps_in_any_case_may_leave_no_replica_any_room_either():
    text = planner(min_rollout_gpus=2)
    found = warnings_of(text, train_gpus="1", rollout_gpus="2")[BESIDE_REPLICAS]
    assert found.what.startswith("of 3 GPUs 2 for rollout and min_train_gpus 1 leave none")
    assert BESIDE_REPLICAS not in warnings_of(text, train_gpus="1", rollout_gpus="3")
    # All of rollout at once may be borrowed.
    lends = planner(min_rollout_gpus=2, elastic_hybrid_min_rollout_gpus=0)
    assert BESIDE_REPLICAS not in warnings_of(lends, train_gpus="1", rollout_gpus="2")


def test_servers_of_others_are_as_many_as_are_named():
    theirs = f"{PLANNER}: {{runtime_manage_rollout_processes: false, min_rollout_gpus: %d}}"
    assert not broken_rules(f"{theirs % 3}\n{ENDPOINTS}")
    found = only(f"{theirs % 4}\n{ENDPOINTS}")
    assert found.path == f"{PLANNER}.min_rollout_gpus"
    assert found.what == "4 exceeds heterogeneous_rollout.endpoints, 3"
    assert only(theirs % 4).path == "heterogeneous_rollout.endpoints"


def test_a_minimum_without_effect_is_no_error():
    assert not broken_rules(f"{PLANNER}: {{elastic_hybrid_min_rollout_gpus: 50}}")
