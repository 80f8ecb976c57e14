import os
import socket

from hypothesis import given
from hypothesis import strategies as st

from libra.config.model import ModelConfig
from libra.config.rollout import RolloutConfig
from libra.config.run import RunConfig
from libra.ids import InstanceId, NodeRank, SlotId
from libra.planner.plan import InstancePlacement, Plan, TrainPlacement
from libra.rewards import sandbox
from libra_supervisor.doctor import checks, probes
from libra_supervisor.doctor.findings import (
    GIB,
    HostDemand,
    disk_finding,
    host_memory_bytes,
    memory_finding,
    runs_in_the_way,
)
from libra_supervisor.run_directory import RunDirectory, held

TINY = HostDemand(
    num_parameters=427_136,
    num_ranks=2,
    model_parallel_size=1,
    num_instances=2,
    num_workers=2,
    engine_bytes_per_parameter=4,
    kv_cache_bytes_per_worker=64 * 2**20,
)


def test_the_quickstart_is_taken_to_need_about_four_gib():
    assert 3.5 * GIB < host_memory_bytes(TINY) < 4.5 * GIB


@given(st.integers(1, 10**11), st.integers(1, 8), st.integers(0, 8))
def test_more_of_anything_never_needs_less_memory(parameters, ranks, instances):
    def demand(**changes):
        base = {
            "num_parameters": parameters,
            "num_ranks": ranks,
            "model_parallel_size": 1,
            "num_instances": instances,
            "num_workers": instances,
            "engine_bytes_per_parameter": 2,
            "kv_cache_bytes_per_worker": 2**20,
        }
        return HostDemand(**{**base, **changes})

    least = host_memory_bytes(demand())
    assert host_memory_bytes(demand(num_ranks=ranks + 1)) > least
    assert host_memory_bytes(demand(num_parameters=parameters + 1)) >= least
    more_engines = demand(num_instances=instances + 1, num_workers=instances + 1)
    assert host_memory_bytes(more_engines) > least


def test_too_little_memory_names_figures_and_what_to_change():
    finding = memory_finding(needed_bytes=3 * GIB, available_bytes=GIB)
    assert not finding.ok
    assert "3.0 GiB needed, 1.0 available" in finding.detail
    assert "rollout_gpus" in finding.advice


def test_a_full_disk_names_the_directory():
    finding = disk_finding(directory="/runs", needed_bytes=GIB, free_bytes=0)
    assert not finding.ok
    assert "/runs" in finding.detail
    assert "keep_last" in finding.advice


def test_a_port_in_use_names_its_key_and_a_free_one_passes():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = probes.port_finding("127.0.0.1", port, "rollout_port_base")
        assert not finding.ok
        assert f"rollout_port_base: 127.0.0.1:{port} is in use" in finding.detail
    assert probes.port_finding("127.0.0.1", port, "rollout_port_base").ok


def test_a_port_that_a_run_of_this_user_has_is_told_with_the_run(tmp_path):
    with held(RunDirectory(tmp_path)), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = probes.port_finding("127.0.0.1", port, "api_port")
    by = f"the supervisor of {tmp_path} (pid {os.getpid()})"
    assert (finding.ok, finding.is_in_use_by_a_run) == (False, True)
    assert finding.detail == f"api_port: 127.0.0.1:{port} is in use by {by}"
    assert finding.advice == "stop that run or change api_port"
    assert runs_in_the_way([finding]) == (finding.detail,)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        finding = probes.port_finding("127.0.0.1", taken.getsockname()[1], "api_port")
    assert runs_in_the_way([finding]) == ()


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(probes, "PACKAGES", {"no_such_package.inner": "it", "json": "json"})
    missing, present = probes.package_findings()
    assert not missing.ok
    assert "scripts/setup.sh" in missing.advice
    assert present.ok


def test_a_reward_that_cannot_run_here_is_found_before_the_run(monkeypatch):
    assert probes.reward_finding("exact_match").ok
    assert probes.reward_finding("my_rewards:own").ok
    assert probes.reward_finding("code").ok
    monkeypatch.setattr(sandbox, "which", lambda _name: None)
    finding = probes.reward_finding("code")
    assert (finding.ok, finding.check) == (False, "reward code")
    assert "install the package bubblewrap" in finding.detail + finding.advice


def test_memory_and_disk_of_this_machine_are_positive(tmp_path):
    assert probes.available_memory_bytes() > 0
    assert probes.free_disk_bytes(tmp_path / "not" / "there" / "yet") > 0


def over_nodes(*, node):
    """Two ranks and a server here, and as many on `node`."""
    slots = tuple(map(SlotId, range(2)))
    train = TrainPlacement(
        tp=1, pp=1, cp=1, ep=1, dp=4, slots=slots * 2, nodes=(*HERE * 2, *(NodeRank(node),) * 2)
    )
    servers = tuple(
        InstancePlacement(instance_id=InstanceId(f"vllm-{n}"), tp=1, slots=(SlotId(2),), node=where)
        for n, where in enumerate((*HERE, NodeRank(node)))
    )
    return Plan(strategy="configured", train=train, instances=servers)


HERE, HOST = (NodeRank(0),), "127.0.0.1"


def test_a_node_needs_memory_and_ports_for_what_is_on_it_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "stored_parameters", lambda _: 10**9)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # That of the second server.
        base = taken.getsockname()[1] - 1
        config = RunConfig(
            model=ModelConfig(model_path="/m"), rollout=RolloutConfig(rollout_port_base=base)
        )

        def found(node):
            plan = over_nodes(node=node)
            return {it.check: it for it in checks.check_site(config, plan, "cpu", tmp_path)}

        assert needed_gib(found(1)) < 0.6 * needed_gib(found(0))
        name = f"port {base + 1}"
        assert not found(0)[name].ok
        assert name not in found(1)
        plan = over_nodes(node=1)
        here, there = (
            {it.check: it for it in checks.check_node(config, plan, "cpu", node=node, host=HOST)}
            for node in (0, 1)
        )
        assert needed_gib(here) == needed_gib(there) == needed_gib(found(1))
        assert not there[name].ok
        assert name not in here


def needed_gib(found):
    return float(found["memory"].detail.partition("about ")[2].partition(" GiB")[0])
