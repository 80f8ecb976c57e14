import subprocess
from shutil import which

import pytest
import yaml

from config_files import broken_rules, config_from, problems_of, warnings_of, write_run
from libra.config.availability import check_availability
from libra.config.environment import Environment, SlurmEnvironment, read_environment
from libra.config.load import dump_yaml
from libra.config.nodes import NodesConfig
from libra.errors import ConfigError, SiteError
from libra_supervisor.nodes.hostlist import expand_hostlist
from libra_supervisor.nodes.site import Site, is_own_address, site_of
from libra_supervisor.nodes.token import node_token
from libra_supervisor.process.spec import without_inherited

ALONE = Environment()
SECRET = "a-secret-of-the-nodes"


def nodes_of(text: str) -> NodesConfig:
    return config_from(f"nodes: {text}").cluster


def step(*, nodes: int = 3, rank: int = 1, tasks: int | None = None, hosts: str = "n[1-3]"):
    slurm = SlurmEnvironment(
        job_id=123_456,
        num_step_nodes=nodes,
        node_rank=rank,
        num_tasks=nodes if tasks is None else tasks,
        step_node_list=hosts,
    )
    return Environment(slurm=slurm)


# Configuration


def test_addresses_may_be_written_in_short():
    found = nodes_of('[a, "b.example:7000", "[fd00::2]:7001", "fd00::3", {host: c, port: 5}]').nodes
    assert [(node.host, node.port) for node in found] == [
        ("a", 0), ("b.example", 7000), ("fd00::2", 7001), ("fd00::3", 0), ("c", 5)
    ]  # fmt: skip


def test_addresses_survive_being_written_out_and_read_again():
    first = config_from("nodes: [a, 'b:7000', {host: '[x'}]")
    said = yaml.safe_load(dump_yaml(first))["nodes"]
    assert config_from(f"nodes: {said}").cluster.nodes == first.cluster.nodes


@pytest.mark.parametrize("text", ["a b", "http://a", "a:port", "a:", ":7", "[::1", "a:123456", ""])
def test_what_can_be_no_machine_is_refused(text: str):
    assert "is no name or address" in broken_rules(f"nodes: [x, {text!r}]")["nodes[1].host"].what


@pytest.mark.parametrize("text", ["a b", "http://a", "a:7000", "[::1]", ""])
def test_what_cannot_be_listened_on_is_refused(text: str):
    said = broken_rules(f"api: {{api_port: 0, api_host: {text!r}}}")["api.api_host"].what
    assert "is no name or address" in said


@pytest.mark.parametrize("text", ["localhost", "0.0.0.0", "::", "fd00::2", "gpu01.example"])
def test_what_can_be_listened_on_is_taken(text: str):
    assert "api.api_host" not in broken_rules(f"api: {{api_port: 0, api_host: {text!r}}}")


def test_the_list_has_to_fit_the_rest():
    assert "a is named 2 times" in broken_rules("nodes: [a, a]")["nodes"].what
    hardware = (
        "hardware: {device_name: x, memory_bytes: 1, dense_bf16_flops: 1, nodes: 3, "
        "memory_bandwidth_bytes_per_s: 1, intra_node_bandwidth_bytes_per_s: 1, "
        "inter_node_bandwidth_bytes_per_s: 1}"
    )
    found = broken_rules(f"nodes: [a, b]\n{hardware}")
    assert found["nodes"].what == "has 2 machines, hardware.nodes is 3"
    assert not broken_rules(f"nodes: [a, b, c]\n{hardware}")


@pytest.mark.parametrize(
    ("said", "missing"),
    [("cert", "key"), ("key", "cert")],
)
def test_half_of_tls_is_refused(said: str, missing: str):
    assert f"node_tls_{missing}" in broken_rules(f"node_tls_{said}: /x.pem")
    assert not broken_rules("node_tls_cert: /c.pem\nnode_tls_key: /k.pem\nnode_tls_ca: /a.pem")
    assert not broken_rules("node_tls_ca: /a.pem")


def test_a_port_that_nobody_listens_on_is_a_warning():
    assert set(warnings_of("nodes: ['a:1', 'b:2']")) == {"nodes[1].port"}


def test_files_must_be_there(tmp_path):
    found = problems_of(write_run(tmp_path, "nodes: [a, b]\nnode_token_file: /no/such/token"))
    assert found["node_token_file"].what == "there is no file /no/such/token"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "[::1]"])
def test_a_server_of_others_that_every_node_would_look_for_on_itself_is_refused(host: str):
    urls = f"{{url: 'http://a:1'}}, {{url: 'http://{host}:1'}}"
    text = f"heterogeneous_rollout: {{endpoints: [{urls}]}}"
    found = check_availability(config_from(f"nodes: [a, b]\n{text}"), ALONE)
    assert [problem.path for problem in found] == ["heterogeneous_rollout.endpoints[1].url"]
    assert "each node's own address" in found[0].what
    assert not check_availability(config_from(f"nodes: [a]\n{text}"), ALONE)
    assert check_availability(config_from(text), step())


def test_plans_of_several_nodes_may_change():
    text = "global_resource_planner: {runtime_dynamic_reconfiguration_enabled: true}"
    assert not check_availability(config_from(f"nodes: [a, b]\n{text}"), ALONE)


# Slurm's lists

LISTS = ["gpu[01-03,7],login", "a[1-2]b[3-4]", "n[9-11]", "n[09-11]", "x", "a,b", "n[1]", "n-[1-2]"]


@pytest.mark.parametrize("text", LISTS)
def test_lists_expand_as_slurm_itself_expands_them(text: str, tmp_path):
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "ClusterName=t\nSlurmctldHost=localhost\nNodeName=localhost CPUs=1\n"
        "PartitionName=p Nodes=localhost\n"
    )
    scontrol = which("scontrol")
    assert scontrol, "requirements/debian-test.txt is not installed"
    done = subprocess.run(  # noqa: S603 - our own words
        [scontrol, "show", "hostnames", text],
        env={"SLURM_CONF": str(conf)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert expand_hostlist(text) == tuple(done.stdout.split())


def test_what_follows_the_brackets_belongs_to_every_name():
    assert expand_hostlist("n[1-2]-ib,m") == ("n1-ib", "n2-ib", "m")


@pytest.mark.parametrize(
    "text",
    [
        *("n[1-2", "n]1[", "n[[1]]", "n[2-1]", "n[a]", "n[]", "a,,b", ",", "n[0-99999]"),
        *("n[" + "9" * 99 + "]", "a[1-999]b[1-999]", ""),
    ],
)
def test_other_text_is_refused(text: str):
    with pytest.raises(ConfigError):
        expand_hostlist(text)


# The site


def test_one_machine_is_no_site():
    assert site_of(nodes_of("[]"), ALONE) is None
    assert site_of(nodes_of("[a]"), ALONE, is_own=lambda _: True) is None
    assert site_of(nodes_of("[]"), step(nodes=1, rank=0, hosts="n1")) is None
    with pytest.raises(ConfigError, match="one node"):
        site_of(nodes_of("[]"), ALONE, node_rank=1)


def test_a_machine_finds_itself_among_the_nodes():
    found = site_of(nodes_of("[a, b, c]"), ALONE, is_own=lambda host: host == "b")
    assert found == Site(hosts=("a", "b", "c"), port=7420, rank=1)
    assert not found.leads
    assert found.own_host == "b"


@pytest.mark.parametrize(
    ("own", "said"), [((), "none is this machine"), (("a", "b"), "a and b are this machine")]
)
def test_a_machine_that_is_none_or_several_of_them_has_to_say_so(own, said):
    said = rf"of nodes \(a, b, c\) {said}; say which one with --node-rank"
    with pytest.raises(ConfigError, match=said):
        site_of(nodes_of("[a, b, c]"), ALONE, is_own=lambda host: host in own)
    found = site_of(nodes_of("[a, b, c]"), ALONE, node_rank=0, is_own=lambda host: host in own)
    assert found is not None
    assert found.leads


def test_slurm_says_who_takes_part():
    found = site_of(nodes_of("[]"), step())
    assert found == Site(hosts=("n1", "n2", "n3"), port=23_456, rank=1)
    named = site_of(nodes_of("['ib1:7000', ib2, ib3]"), step(rank=2))
    assert named == Site(hosts=("ib1", "ib2", "ib3"), port=7000, rank=2)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (step(tasks=6), "--ntasks-per-node=1"),
        (step(nodes=2), "has 3 machines, this step 2"),
        (step(rank=3), "out of range"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(environment: Environment, said: str):
    with pytest.raises(ConfigError, match=said):
        site_of(nodes_of("[]"), environment)


def test_an_address_is_ours_when_the_kernel_says_so():
    assert is_own_address("127.0.0.1")
    assert is_own_address("localhost")
    assert not is_own_address("192.0.2.1")
    assert not is_own_address("no.such.host.invalid")


# The secret


def test_the_secret_comes_from_the_first_place_that_has_one(tmp_path):
    file, credentials = tmp_path / "token", tmp_path / "credentials"
    credentials.mkdir()
    for path, text in ((file, f"{SECRET}-file\n"), (credentials / "node-token", f"{SECRET}-unit")):
        path.touch(mode=0o600)
        path.write_text(text)
    environ = {"LIBRA_NODE_TOKEN": f"{SECRET}-var", "CREDENTIALS_DIRECTORY": str(credentials)}
    environment = read_environment(environ)
    assert node_token(str(file), environment) == f"{SECRET}-file"
    assert node_token("", environment) == f"{SECRET}-unit"
    (credentials / "node-token").unlink()
    assert node_token("", environment) == f"{SECRET}-var"
    with pytest.raises(SiteError, match="need a secret"):
        node_token("", Environment())


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (SECRET, 0o640, "others may read"),
        ("short", 0o600, "is no secret"),
        ("", 0o600, "is no secret"),
        ("ä" * 20, 0o600, "plain ASCII"),
        ("a" * 10 + "\n" + "b" * 10, 0o600, "is no secret"),
    ],
)
def test_a_token_file_that_is_no_secret_is_refused_without_being_shown(tmp_path, text, mode, said):
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(SiteError, match=said) as found:
        node_token(str(file), ALONE)
    assert not text or text not in str(found.value)
    with pytest.raises(SiteError, match="cannot be read"):
        node_token(str(tmp_path / "none"), ALONE)


def test_no_child_is_handed_the_secret():
    inherited = without_inherited({"LIBRA_NODE_TOKEN": SECRET, "PATH": "/bin"}, keeps_proxy=False)
    assert inherited == {"PATH": "/bin"}
