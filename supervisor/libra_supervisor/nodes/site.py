"""Which machines take part in the run, and which of them this one is."""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

from libra.config.environment import Environment, SlurmEnvironment
from libra.config.nodes import NodeAddress, NodesConfig
from libra.errors import ConfigError
from libra.ids import NodeRank
from libra_supervisor.nodes.hostlist import expand_hostlist

DEFAULT_PORT: Final = 7420
_SLURM_PORTS: Final = (20_000, 10_000)
LEADER: Final = NodeRank(0)


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """The machines of one run, seen from one of them."""

    hosts: tuple[str, ...]
    """By rank."""

    port: int
    """Where the leader listens for the others."""

    rank: NodeRank
    """Of this machine."""

    @property
    def num_nodes(self) -> int:
        return len(self.hosts)

    @property
    def leads(self) -> bool:
        return self.rank == LEADER

    @property
    def own_host(self) -> str:
        return self.hosts[self.rank]


def site_of(
    config: NodesConfig,
    environment: Environment,
    *,
    node_rank: int | None = None,
    is_own: Callable[[str], bool] | None = None,
) -> Site | None:
    """The site as `nodes` or Slurm describe it; None for a run on one machine.

    `node_rank` is what the command line says and wins over Slurm, which wins over looking for our
    own address among `nodes`. Raises ConfigError when they contradict each other or leave it open.
    """
    step = environment.slurm
    if step is not None and step.num_step_nodes < 2:  # noqa: PLR2004 - more than one
        step = None
    if not config.nodes and step is None:
        if node_rank:
            raise ConfigError(f"--node-rank {node_rank}: this run has one node; set nodes")
        return None
    hosts = _hosts(config, step)
    if len(hosts) == 1:
        return None
    rank = _rank(hosts, step, node_rank, is_own or is_own_address)
    return Site(hosts=hosts, port=_port(config, environment.slurm), rank=rank)


def is_own_address(host: str) -> bool:
    """Whether `host` is a name or an address of this machine: the kernel lets us bind to it."""
    if host == socket.gethostname():
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _hosts(config: NodesConfig, step: SlurmEnvironment | None) -> tuple[str, ...]:
    named = tuple(node.host for node in config.nodes)
    if step is None:
        return named
    if step.num_tasks != step.num_step_nodes:
        raise ConfigError(
            f"this Slurm step has {step.num_tasks} tasks on {step.num_step_nodes} nodes; start it "
            "with srun --ntasks-per-node=1"
        )
    hosts = named or expand_hostlist(step.step_node_list or step.node_list)
    if len(hosts) != step.num_step_nodes:
        whose = "nodes has" if named else "Slurm's list of nodes has"
        raise ConfigError(f"{whose} {len(hosts)} machines, this step {step.num_step_nodes}")
    return hosts


def _rank(
    hosts: tuple[str, ...],
    step: SlurmEnvironment | None,
    given: int | None,
    is_own: Callable[[str], bool],
) -> NodeRank:
    rank = given if given is not None else None if step is None else step.node_rank
    if rank is not None:
        if not 0 <= rank < len(hosts):
            raise ConfigError(f"node rank {rank} is out of range: there are {len(hosts)} nodes")
        return NodeRank(rank)
    own = [index for index, host in enumerate(hosts) if is_own(host)]
    if len(own) != 1:
        found = " and ".join(hosts[index] for index in own) or "none"
        raise ConfigError(
            f"of nodes ({', '.join(hosts)}) {found} {'are' if own else 'is'} this machine; say "
            "which one with --node-rank"
        )
    return NodeRank(own[0])


def _port(config: NodesConfig, slurm: SlurmEnvironment | None) -> int:
    first = config.nodes[0] if config.nodes else NodeAddress(host="")
    if first.port or config.node_port:
        return first.port or config.node_port
    if slurm is None:
        return DEFAULT_PORT
    base, count = _SLURM_PORTS
    return base + slurm.job_id % count
