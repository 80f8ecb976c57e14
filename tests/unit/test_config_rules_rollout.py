import pytest

from config_files import ARCH, broken_rules, config_from, only_problem, warnings_of
from libra.config.arithmetic import rollout_buckets, staleness
from libra.config.rollout import TpBucket

PLANNER = "global_resource_planner"


def test_a_response_leaves_room_for_a_prompt():
    problem = only_problem(max_model_len="64", max_new_tokens="64")
    assert (problem.path, problem.hint) == ("max_new_tokens", "at most 63")


def test_the_context_stays_within_the_models_positions():
    assert only_problem(ARCH, max_model_len="9000").hint == "at most 8192"


def test_the_cache_holds_one_sequence():
    options = {"device": "cpu", "train_dtype": "float32", "max_model_len": "8192"}
    # 2 x 6 layers x 4 heads x 32 x 4 bytes = 6144 bytes a token; 64 MiB hold 10922.
    assert not broken_rules(ARCH, **options)
    assert not broken_rules(ARCH, **options, rollout_kv_cache_bytes=str(6144 * 8192))
    problem = only_problem(ARCH, **options, rollout_kv_cache_bytes=str(6144 * 8192 - 1))
    assert problem.hint == "at least 50331648, or a max_model_len of at most 8191"


def test_staleness_counts_whole_versions():
    assert (
        only_problem(max_head_offpolicyness="1.5").hint == "nearest: 1 or 2, or .inf for no bound"
    )
    assert not broken_rules(max_head_offpolicyness="0")


def test_staleness_covers_the_sync_interval():
    problem = only_problem(sync_interval="4", max_head_offpolicyness="2")
    assert problem.hint == "at least 3, or a sync_interval of at most 3"
    assert not broken_rules(sync_interval="4", max_head_offpolicyness="3")


def test_engines_that_never_sync_need_unbounded_staleness_and_are_warned_about():
    options = {"rollout_weight_sync_mode": "none"}
    assert only_problem(**options).hint == "write .inf"
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
    assert only_problem(max_concurrent_rollouts="3").hint == "nearest: 4"


def test_pinned_instances_use_every_rollout_gpu():
    text = "heterogeneous_rollout: {instances: [{tp: 1, count: 4}, {tp: 4, count: 2}]}"
    assert not broken_rules(text, rollout_gpus="12")
    problem = only_problem(text, rollout_gpus="8")
    assert problem.what == "4 x TP 1 + 2 x TP 4 use 12 GPUs, not rollout_gpus, 8"
    assert rollout_buckets(config_from(text)) == (TpBucket(tp=1, count=4), TpBucket(tp=4, count=2))
    assert rollout_buckets(config_from(rollout_gpus="3")) == (TpBucket(tp=1, count=3),)


def test_servers_are_ours_or_somebody_elses():
    unmanaged = f"{PLANNER}: {{runtime_manage_rollout_processes: false}}\n"
    endpoints = "heterogeneous_rollout: {endpoints: [{url: 'http://a:1'}]}"
    assert not broken_rules(unmanaged + endpoints)
    assert only_problem(unmanaged).path == "heterogeneous_rollout.endpoints"
    assert only_problem(endpoints).path == "heterogeneous_rollout.endpoints"
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
    assert only_problem(text, **options).path == path


@pytest.mark.parametrize("url", ["a:1", "http://a", "ftp://a:1", "http://a:1/v1", "http://a b:1"])
def test_an_endpoint_is_the_root_of_a_server(url: str):
    text = (
        f"{PLANNER}: {{runtime_manage_rollout_processes: false}}\n"
        f"heterogeneous_rollout: {{endpoints: [{{url: '{url}'}}]}}"
    )
    assert "http://host:port" in only_problem(text).what


def test_an_endpoint_is_named_once():
    text = (
        f"{PLANNER}: {{runtime_manage_rollout_processes: false}}\n"
        "heterogeneous_rollout: {endpoints: [{url: 'http://[::1]:1'}, {url: 'http://[::1]:1/'}]}"
    )
    assert "named twice" in only_problem(text).what


def test_ports_do_not_overlap_or_run_out():
    assert only_problem(
        "api: {api_port: 8003}", rollout_port_base="8000", rollout_gpus="4"
    ).path == ("api.api_port")
    assert not broken_rules("api: {api_port: 8004}", rollout_port_base="8000", rollout_gpus="4")
    assert not broken_rules("api: {api_port: 0}", rollout_port_base="0", rollout_gpus="4")
    assert only_problem(rollout_port_base="65534", rollout_gpus="3").hint == "at most 65533"


def test_the_backend_of_transfers_is_ours():
    flag = "--weight-transfer-config={}"
    problem = only_problem(f'rollout_extra_args: ["{flag}"]')
    assert "--weight-transfer-config is set by the run itself" in problem.what


@pytest.mark.parametrize("argument", ["--port", "--port=1", "--max_model_len", "-tp"])
def test_extra_arguments_that_would_undo_the_runs_own_are_refused(argument: str):
    problem = only_problem(rollout_extra_args=f"['{argument}', '5']")
    assert problem.path == "rollout_extra_args"
    assert problem.hint.startswith("set ")
    assert not broken_rules(rollout_extra_args="['--block-size', '16']")
