import socket

import pytest

from libra.errors import SiteError
from libra_supervisor.instances.port_lease import lease_port

LOCAL = "127.0.0.1"


@pytest.mark.case("R-B70")
@pytest.mark.case("T-B81")
def test_a_held_port_can_be_listened_on_by_its_server_and_by_no_plain_stranger():
    lease = lease_port(LOCAL)
    try:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((LOCAL, lease.port))
        with (
            socket.create_server((LOCAL, lease.port)) as server,
            socket.create_connection((LOCAL, lease.port)) as client,
        ):
            peer, _ = server.accept()
            with peer:
                client.sendall(b"x")
                assert peer.recv(1) == b"x"
    finally:
        lease.close()


def test_many_leases_at_once_are_all_different():
    leases = [lease_port(LOCAL) for _ in range(50)]
    try:
        assert len({lease.port for lease in leases}) == 50
    finally:
        for lease in leases:
            lease.close()


def test_a_port_that_somebody_listens_on_is_refused_with_the_key_and_what_to_do():
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SiteError, match=f"rollout_port_base: port {port} .* is in use; end"):
            lease_port(LOCAL, port)


@pytest.mark.case("R-B70")
def test_the_closed_connections_of_a_server_that_ended_do_not_hold_its_port():
    with socket.create_server((LOCAL, 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection((LOCAL, port))
        connection, _ = server.accept()
        # Who closes first keeps the connection in TIME_WAIT.
        connection.close()
        assert client.recv(1) == b""
        client.close()
    with pytest.raises(OSError, match="in use"), socket.socket() as plain:
        plain.bind((LOCAL, port))
    lease = lease_port(LOCAL, port)
    assert lease.port == port
    lease.close()


@pytest.mark.case("R-B70")
def test_a_server_beside_closed_connections_still_holds_its_port():
    with socket.create_server((LOCAL, 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection((LOCAL, port))
        server.accept()[0].close()
        client.close()
        with pytest.raises(SiteError, match=f"{port} on {LOCAL} is in use"):
            lease_port(LOCAL, port)
