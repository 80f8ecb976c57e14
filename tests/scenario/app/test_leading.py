"""A leader's program where it must not begin."""

import socket

import pytest

NODES = {"LIBRA_NODE_TOKEN": "a token of these nodes"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "port for other nodes"),
        (("node_tls_ca",), "the leader needs node_tls_cert"),
        (("node_tls_cert", "node_tls_key"), "cannot be used"),
    ],
)
def test_a_leader_that_cannot_listen_leaves_no_run_directory_behind(
    fake_run, free_ports, tmp_path, options, said
):
    port, pem = free_ports(1), tmp_path / "x.pem"
    pem.write_text("no certificate")
    nodes = [f"127.0.0.1:{port}", "127.0.0.2"]
    run = fake_run(nodes=nodes, **dict.fromkeys(options, str(pem)))
    run.env |= NODES
    with socket.create_server(("127.0.0.1", port if not options else 0)):
        run.start("--node-rank", "0")
        assert run.wait() == 5
    assert said in run.tail()
    assert not run.run_dir.exists()


def test_a_dry_run_beside_a_run_of_the_same_user_says_what_that_has_and_goes_on(
    fake_run, free_ports, tmp_path
):
    port = free_ports(1)
    run = fake_run(nodes=[f"127.0.0.1:{port}", "127.0.0.2"])
    run.env |= NODES
    run.start("--node-rank", "0")
    run.until(lambda: listens(port))
    pid = run.process.pid
    other = tmp_path / "other"
    tried = ("run", str(run.config), "--dry-run", "--node-rank", "0", "--run-dir")
    beside = run.call_bare(*tried, str(other))
    assert beside.returncode == 0, beside.stderr
    assert beside.stdout.startswith(f"{other}\ntrain 2 GPUs")
    of_the_run = f"127.0.0.1:{port} is in use by the supervisor of {run.run_dir} (pid {pid})"
    assert f"warning: the port for other nodes (node_port): {of_the_run}; " in beside.stderr
    same = run.call_bare(*tried, str(run.run_dir), "--resume")
    assert same.returncode == 0, same.stderr
    assert f"warning: {run.run_dir} is in use by libra-supervisor pid {pid} on " in same.stderr
    assert of_the_run in same.stderr
    # One that is to start does not, and says whose the port is.
    started = run.call_bare(*(it for it in tried if it != "--dry-run"), str(other))
    assert started.returncode == 5
    assert f"{of_the_run}; stop that run or change" in started.stderr
    assert not other.exists()


def test_a_dry_run_fails_for_a_port_of_anybody_else(fake_run, free_ports):
    port = free_ports(1)
    run = fake_run(nodes=[f"127.0.0.1:{port}", "127.0.0.2"])
    run.env |= NODES
    with socket.create_server(("127.0.0.1", port)):
        done = run.call("run", str(run.config), "--dry-run", "--node-rank", "0")
    assert done.returncode == 5
    assert f"{port} is in use; end what listens there" in done.stderr


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
