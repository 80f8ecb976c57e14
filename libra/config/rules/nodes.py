"""Rules about several nodes."""

from collections import Counter
from collections.abc import Iterator

from libra.config.nodes import is_host
from libra.config.problems import Problem
from libra.config.run import RunConfig


def addresses_are_addresses(config: RunConfig) -> Iterator[Problem]:
    """Refuse what can be no host's name or address."""
    for index, node in enumerate(config.cluster.nodes):
        if not node.is_plausible:
            yield Problem(
                path=f"nodes[{index}].host",
                what=f"{node.host!r} is no name or address of a machine",
                hint="write host, host:port or [IPv6]:port",
            )


def listening_address_is_one(config: RunConfig) -> Iterator[Problem]:
    """Refuse to listen on what can be no host's name or address."""
    host = config.api.api_host
    if not is_host(host):
        what = f"{host!r} is no name or address of a machine"
        yield Problem(path="api.api_host", what=what, hint="0.0.0.0 or :: listens on every one")


def nodes_differ(config: RunConfig) -> Iterator[Problem]:
    """Refuse a machine that is named twice: nobody could say which of the two it is."""
    counts = Counter(node.host for node in config.cluster.nodes)
    for host, count in counts.items():
        if count > 1:
            yield Problem(path="nodes", what=f"{host} is named {count} times", hint="once each")


def hardware_agrees(config: RunConfig) -> Iterator[Problem]:
    """Check the number of nodes against the one that `hardware` describes."""
    nodes, hardware = config.cluster.nodes, config.hardware
    if nodes and hardware is not None and hardware.nodes != len(nodes):
        yield Problem(
            path="nodes",
            what=f"has {len(nodes)} machines, hardware.nodes is {hardware.nodes}",
            hint="make them agree",
            related=("hardware.nodes",),
        )


def certificate_has_its_key(config: RunConfig) -> Iterator[Problem]:
    """Check that TLS has both of its halves."""
    cluster = config.cluster
    for there, path, other in (
        (cluster.node_tls_cert, "node_tls_key", cluster.node_tls_key),
        (cluster.node_tls_key, "node_tls_cert", cluster.node_tls_cert),
    ):
        if there and not other:
            yield Problem(
                path=path,
                what="is not set, but TLS needs certificate and key",
                hint="name the file, or leave out both",
                related=("node_tls_cert", "node_tls_key"),
            )
            return


def ports_of_others(config: RunConfig) -> Iterator[Problem]:
    """Warn of ports that nobody listens on."""
    for index, node in enumerate(config.cluster.nodes):
        if index and node.port:
            yield Problem(
                path=f"nodes[{index}].port",
                what="has no effect: only the first node listens for the others",
                hint="leave it out",
            )


RULES = (
    addresses_are_addresses,
    listening_address_is_one,
    nodes_differ,
    hardware_agrees,
    certificate_has_its_key,
)
WARNINGS = (ports_of_others,)
