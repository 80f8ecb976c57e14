import pytest

from config_files import broken_rules, only_problem

SCHEDULING = "heterogeneous_rollout.scheduling"


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
    assert only_problem(text).path == path


def test_capacities_of_other_degrees_would_leave_every_instance_out():
    text = (
        "heterogeneous_rollout: {scheduling: {load_metric: kv_tokens, "
        "kv_capacity_tokens_by_tp: {4: 9}}}"
    )
    assert only_problem(text).path == f"{SCHEDULING}.kv_capacity_tokens_by_tp"


def test_a_weight_belongs_to_an_instance_or_a_degree_of_the_run():
    options = "load_balance_strategy: weighted, load_balance_weights: {NAME: 2}"
    text = "heterogeneous_rollout: {instances: [{tp: 1, count: 2}], scheduling: {" + options + "}}"
    for name in ("vllm-1", "tp1"):
        assert not broken_rules(text.replace("NAME", name), rollout_gpus="2")
    for name in ("vllm-2", "tp2", "nonsense"):
        problem = only_problem(text.replace("NAME", name), rollout_gpus="2")
        assert (problem.path, problem.hint) == (
            f"{SCHEDULING}.load_balance_weights",
            "one of tp1, vllm-0, vllm-1",
        )
