"""Where the ranks of a gang lie, and what each of its agents is told."""

from random import Random

import msgspec
import pytest

from libra.ids import NodeRank
from libra.planner.plan import TrainPlacement
from libra_supervisor.app.cluster import Cluster
from libra_supervisor.nodes.site import Site
from libra_supervisor.ranks.torchrun import (
    AgentSite,
    Attempt,
    GangSite,
    GangSpec,
    attempt_spec,
    with_port,
)
from libra_supervisor.run_directory import RunDirectory


def cluster() -> Cluster:
    made = Cluster.__new__(Cluster)
    made.site = Site(hosts=("127.0.0.1", "10.0.0.2", "10.0.0.3"), port=1, rank=NodeRank(0))
    return made


def placement(nodes, slots):
    return TrainPlacement(
        tp=1, pp=1, cp=1, ep=1, dp=len(slots), slots=tuple(slots), nodes=tuple(nodes)
    )


def test_every_node_with_ranks_has_one_agent_in_their_order():
    agents = cluster().agents(placement((0, 1, 1, 2), (7, 0, 1, 0)), {"A": "b"}, ())
    assert [(it.node, it.host, it.num_ranks) for it in agents] == [
        (0, "127.0.0.1", 1), (1, "10.0.0.2", 2), (2, "10.0.0.3", 1)
    ]  # fmt: skip
    assert agents[0].env == {"A": "b", "GLOO_SOCKET_IFNAME": "lo"}
    assert agents[1].env == {}
    kept = cluster().agents(placement((0,), (0,)), {"GLOO_SOCKET_IFNAME": "ib0"}, ())
    assert kept[0].env["GLOO_SOCKET_IFNAME"] == "ib0"


def test_devices_are_named_here_and_counted_elsewhere():
    agents = cluster().agents(placement((0, 0, 1), (1, 3, 2)), {}, ("a", "b", "c", "d"))
    assert [it.visible_devices for it in agents] == [("b", "d"), ("2",)]


def gang_site(tmp_path, agents):
    return GangSite(
        run_id="r",
        directory=RunDirectory(tmp_path),
        placement=placement((1, 1, 2), (0, 1, 0)),
        device="cpu",
        env={},
        agents=agents,
    )


def attempt(incarnation="i-1"):
    return Attempt(
        number=4, incarnation=incarnation, control_socket="/s", restore=None, shutdown_grace_s=3
    )


def test_agents_of_an_attempt_meet_under_an_id_of_its_own_at_the_first_one_s_host(tmp_path):
    agents = (
        AgentSite(node=NodeRank(1), host="10.0.0.2", num_ranks=2, env={}),
        AgentSite(node=NodeRank(2), host="10.0.0.3", num_ranks=1, env={"X": "y"}),
    )
    spec = attempt_spec(gang_site(tmp_path, agents), attempt())
    assert isinstance(spec, GangSpec)
    (first, one), (second, two) = spec.parts
    assert (first, second) == (1, 2)
    assert (one.child_id, two.child_id) == ("trainer-1", "trainer-2")
    for number, part, count in ((0, one, 2), (1, two, 1)):
        argv = with_port(part, 4711).argv
        assert {
            "--nnodes=2", f"--node-rank={number}", f"--nproc-per-node={count}",
            "--max-restarts=0", "--rdzv-backend=static", "--master-addr=10.0.0.2",
            "--master-port=4711", "--rdzv-id=r-i-1",
        } <= set(argv)  # fmt: skip
        assert part.is_bound_to_supervisor
        assert "GLOO_SOCKET_IFNAME" not in part.env
        assert part.env["LIBRA_RANK_0_HOST"] == "10.0.0.2"
    assert two.env["X"] == "y"
    again = attempt_spec(gang_site(tmp_path, agents), attempt("i-2"))
    assert isinstance(again, GangSpec)
    assert "--rdzv-id=r-i-2" in again.parts[0][1].argv


def test_a_replica_s_agents_are_told_whose_ranks_they_start(tmp_path):
    agents = (
        AgentSite(node=NodeRank(0), host="10.0.0.1", num_ranks=1, env={}),
        AgentSite(node=NodeRank(2), host="10.0.0.3", num_ranks=2, env={}),
    )
    site = msgspec.structs.replace(gang_site(tmp_path, agents), child_id="hybrid-3")
    spec = attempt_spec(site, attempt())
    assert isinstance(spec, GangSpec)
    assert [part.child_id for _, part in spec.parts] == ["hybrid-3", "hybrid-3-2"]
    assert {part.env["LIBRA_GANG"] for _, part in spec.parts} == {"hybrid-3"}


def test_a_gang_on_one_node_is_one_process_as_ever(tmp_path):
    spec = attempt_spec(gang_site(tmp_path, ()), attempt())
    assert not isinstance(spec, GangSpec)
    assert spec.child_id == "trainer"
    assert "--rdzv-endpoint=127.0.0.1:0" in spec.argv
    assert spec.env["GLOO_SOCKET_IFNAME"] == "lo"
    assert "LIBRA_RANK_0_HOST" not in spec.env
    hybrid = msgspec.structs.replace(gang_site(tmp_path, ()), child_id="hybrid-0")
    assert attempt_spec(hybrid, attempt()).child_id == "hybrid-0"


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_lie_together_are_one_agent_wherever_they_are(seed):
    rng = Random(seed)
    counts = [rng.randint(1, 4) for _ in range(3)]
    nodes = [node for node, count in enumerate(counts) for _ in range(count)]
    agents = cluster().agents(placement(nodes, range(len(nodes))), {}, ())
    assert [it.num_ranks for it in agents] == counts
