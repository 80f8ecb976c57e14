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
