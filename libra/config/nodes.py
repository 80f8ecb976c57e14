"""Several nodes: who takes part, how they find and trust each other, and when one counts as lost.

With Slurm (`srun`, one task per node) the members come from its variables and `nodes` stays empty.
"""

import re
from typing import Annotated, Final, Literal

import msgspec

from libra.config.base import Config, NonNegativeFloat, PathText, Port

_HOST: Final = re.compile(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%[\w.-]+)?")
_NUM_PORT_DIGITS: Final = 5

LeaseSeconds = Annotated[float, msgspec.Meta(ge=1)]
"""A node says five times in a lease that it lives. With less than a second between the ends of it
that is more often than what was lost on the network is sent again (0.2 s at best on Linux): one
packet too many would take ranks down."""


class NodeAddress(Config, frozen=True, kw_only=True):
    """One machine of the run. `host`, `host:port` and `[IPv6]:port` are short for it."""

    host: str
    """Name or address under which the other nodes reach it."""

    port: Port = 0
    """Where the first node listens for the others; 0 takes node_port. Others do not listen."""

    @property
    def is_plausible(self) -> bool:
        """Whether the host can be a name or an address at all."""
        return is_host(self.host)


def is_host(text: str) -> bool:
    """Whether it can be the name or the address of a machine at all."""
    return _HOST.fullmatch(text) is not None


def split_address(text: str) -> dict[str, str | int]:
    """`host`, `host:port`, `[IPv6]:port` or a bare IPv6 address to the fields of a NodeAddress.

    Text that is none of these comes back whole as the host, which a rule then refuses.
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if bracket and not rest:
            return {"host": host}
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    else:
        return {"host": text}
    if not host or not (port.isascii() and port.isdigit()) or len(port) > _NUM_PORT_DIGITS:
        return {"host": text}
    return {"host": host, "port": int(port)}


class NodesConfig(Config, frozen=True, kw_only=True):
    """Flat keys of a run over several nodes."""

    nodes: list[NodeAddress] = []
    """The machines, in order of their rank; the first leads. Empty: Slurm's, else this one
    alone."""

    node_port: Port = 0
    """Port on which the leader listens for the other nodes; 0 takes 7420, and under Slurm
    20000 + job id modulo 10000, so that two jobs on one machine do not meet."""

    node_lease_s: LeaseSeconds = 15.0
    """How long a node goes on without hearing from the leader, in seconds of its own clock. The
    leader takes it for lost only after that. At least 1: the two hear of each other five times in
    it."""

    node_orphan_grace_s: NonNegativeFloat = 120.0
    """How much longer its servers wait for a leader that is started again, in seconds; its ranks
    do not wait."""

    node_loss_policy: Literal["wait", "shrink"] = "wait"
    """What becomes of a run that lost a node for good: wait has everything that lay there wait for
    the node, shrink goes on with what is left and takes the node in again when it comes back."""

    node_loss_patience_s: NonNegativeFloat = 30.0
    """With node_loss_policy shrink: how long a node is gone, in seconds, before the run does
    without it, and how long it has to be back before the run counts on it again."""

    node_token_file: PathText = ""
    """File with the secret that the nodes share, readable by its owner alone. Empty: the
    credential `node-token` of systemd, else the environment variable LIBRA_NODE_TOKEN."""

    node_tls_cert: PathText = ""
    """Certificate chain (PEM) that the leader shows; empty leaves the link unencrypted."""

    node_tls_key: PathText = ""
    """Private key (PEM) of node_tls_cert."""

    node_tls_ca: PathText = ""
    """Certificates (PEM) that a node accepts as the signer of the leader's; empty takes the
    machine's own."""
