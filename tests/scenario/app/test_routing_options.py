"""Options of routing in a whole run on fake servers: each reaches the part that it is for."""

import http.client
import json

import pytest

from fake_runs import FakeRun

pytestmark = pytest.mark.timeout(400)
SCHEDULING = "heterogeneous_rollout.scheduling"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def running(tmp_path_factory, shared):
    run = FakeRun(tmp_path_factory.mktemp("run"), total_steps=1_000_000, api={"api_port": 0})
    options = {
        "load_metric": "kv_tokens",
        "enable_metrics_feedback": "true",
        "metrics_poll_interval_s": "9",
        "prefix_affinity": "true",
        "queue_deadline_s": "2",
        "shared_load_dir": shared,
    }
    try:
        pairs = [f"-o{SCHEDULING}.{name}={value}" for name, value in options.items()]
        run.start("--log-level", "debug", *pairs)
        run.until_step(2)
        yield run
    finally:
        run.end()


def ask(run, method, path, body=None, **headers):
    """Status, headers and text of an answer over TCP."""
    port = run.said("api_listens")[0]["port"]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, path, body and json.dumps(body), named)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def test_the_gateway_serves_and_stamps(running):
    body = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 4}
    status, headers, answer = ask(running, "POST", "/v1/completions", body)
    assert (status, len(json.loads(answer)["choices"][0]["token_ids"])) == (200, 4)
    assert headers["X-Libra-Instance"] in {"vllm-0", "vllm-1"}
    assert int(headers["X-Libra-Policy-Version"]) >= 1


def test_a_request_waits_no_longer_than_the_configured_deadline(running):
    body = {"model": "policy", "prompt": [5], "max_tokens": 4}
    status, headers, answer = ask(
        running, "POST", "/v1/completions", body, X_Libra_Min_Version="1000000"
    )
    assert (status, headers["Retry-After"]) == (503, "1")
    # Why it is waited for depends on whether engines load weights at that moment.
    assert "found no instance within" in json.loads(answer)["error"]["message"]


def test_decisions_are_explained_by_the_configured_metric_and_strategy(running):
    explained = running.until(lambda: running.said("request_explained"))[-1]
    assert (explained["load_metric"], explained["strategy"]) == ("kv_tokens", "least_connections")
    capacities = {view["kv_capacity_tokens"] for view in explained["instances"]}
    assert capacities == {1536}, "as the servers measured it"


def test_feedback_is_polled_at_the_configured_interval(running):
    """At the default of 3 s no snapshot would grow so old."""

    def has_an_old_snapshot():
        explained = running.said("request_explained")[-20:]
        views = [view for entry in explained for view in entry["instances"]]
        return any((view["snapshot_age_s"] or 0.0) > 7.0 for view in views)

    running.until(has_an_old_snapshot)


def test_siblings_keep_to_their_prefix_and_that_is_counted(running):
    _, _, page = ask(running, "GET", "/metrics")
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[:1] != "#")
    name = "libra_prefix_affinity_lookups_total"
    assert float(lines[f'{name}{{outcome="new"}}']) > 0
    assert float(lines[f'{name}{{outcome="kept"}}']) > 0


def test_the_load_of_the_run_is_told_to_others(running, shared):
    def written():
        return [json.loads(path.read_text()) for path in shared.glob("load_*.json")]

    run_id = running.status()["run_id"]
    assert {content["rank"] for content in written()} == {f"{run_id}-0"}
    running.until(lambda: any(content["load"] for content in written()))
