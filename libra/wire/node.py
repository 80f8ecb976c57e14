"""What the leader and a follower say to each other over their one connection.

The follower opens a WebSocket at `NODE_PATH` with the token of the nodes as bearer. Its first
message is a Hello, the answer a Welcome or a Refused; after a Welcome every message, in both
directions, is an Envelope. All are msgpack. No time of one host ever means anything on the other:
what has to be counted is counted in beats.
"""

from typing import Final, TypeAlias

import msgspec

from libra.ids import Incarnation, InstanceId, NodeRank, RunId, SlotId
from libra.wire.instance import ReloadAck, ReloadRequest

NODE_PATH: Final = "/v1/node"
PROTOCOL: Final = 1
MAX_HELLO_BYTES: Final = 1 << 20
MAX_ENVELOPE_BYTES: Final = 8 << 20
"""A longer one ends the connection before it is read."""

MAX_PIECE_BYTES: Final = 1 << 20
"""Longest piece of a byte stream in one message: others find their way between two of them."""


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Who wants to be a member, and with which session it goes on."""

    protocol: int
    version: str
    """Libra's; nodes of one run have the same."""

    config_digest: str
    """Of the configuration this node was started with."""

    run_id: str
    """Empty until the leader has told it."""

    node: NodeRank
    host: str
    boot_id: str
    pid: int
    start_ticks: int
    """With pid and boot id it proves which process speaks; of two processes that speak for a node
    of one machine the later has the higher."""

    dial: int
    """Counts this process's connections: of two the later has the higher, whichever comes first."""

    num_slots: int | None
    """Devices here; None on CPU, where a slot is no device."""

    session: str = ""
    """Empty: a new one. Nothing that was done in an earlier one is owed any more."""

    received: int = 0
    """Number of the newest message of the session that has come in here."""

    term: int = 0
    """The highest that it has obeyed."""

    servers: tuple[InstanceId, ...] = ()
    """Servers that still run here."""


class Welcome(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The Hello fits."""

    run_id: RunId
    run_directory: str
    """On the file system that the nodes share."""

    term: int
    leader: str
    """Of the leader's process: tells two apart that took the same term."""

    session: str
    received: int
    lease_s: float
    orphan_grace_s: float


class Refused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The Hello does not fit."""

    reason: str
    is_final: bool
    """True: another try ends the same way. False: come again, without the session."""


HelloReply: TypeAlias = Welcome | Refused


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """One message of a session, or a mere sign of life."""

    ack: int
    """Every message of the other side up to this number has come in."""

    beat: int
    """From a follower: the number of this sign of life, from 1. From the leader: the newest
    one that has come in; the follower's lease counts from the moment when it sent that one."""

    number: int = 0
    """From 1 in each direction of a session; 0: there is no body."""

    body: bytes = b""


# Commands


class ServerPlace(msgspec.Struct, frozen=True):
    """One server of this node."""

    instance_id: InstanceId
    tp: int
    slots: tuple[SlotId, ...]
    port: int
    """0: any."""


class RunServers(msgspec.Struct, frozen=True, tag=True):
    """Run exactly these: one that is not named ends, one that runs already goes on."""

    servers: tuple[ServerPlace, ...]


class ServeFrom(msgspec.Struct, frozen=True, tag=True):
    """Weights from which a server that is replaced starts; empty: the base model."""

    directory: str


class ReplaceServer(msgspec.Struct, frozen=True, tag=True):
    instance_id: InstanceId
    reason: str


class ReloadServer(msgspec.Struct, frozen=True, tag=True):
    """Have it load a version; answered by ServerReloaded with the same nonce."""

    instance_id: InstanceId
    request: ReloadRequest


class EndServers(msgspec.Struct, frozen=True, tag=True):
    """The run is over: drain and end every server; a second one shortens the deadlines."""


class StartAgent(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Start this node's part of a gang: one torchrun agent."""

    attempt: int
    incarnation: Incarnation
    restore: str
    """A checkpoint's directory; empty begins anew."""

    shutdown_grace_s: float
    slots: tuple[SlotId, ...]
    """Of the ranks here, in their order."""

    agent: int
    """Rank of this agent among the gang's."""

    num_agents: int
    rendezvous_host: str
    rendezvous_port: int


class EndAgent(msgspec.Struct, frozen=True, tag=True):
    """End the agent and its ranks, answered by AgentEnded; `in_hurry`: at once."""

    attempt: int
    in_hurry: bool


class ToRank(msgspec.Struct, frozen=True, tag=True):
    """The next bytes for a rank's control socket."""

    attempt: int
    rank: int
    data: bytes


NodeCommand: TypeAlias = (
    RunServers
    | ServeFrom
    | ReplaceServer
    | ReloadServer
    | EndServers
    | StartAgent
    | EndAgent
    | ToRank
)


# Events


class ChildSaid(msgspec.Struct, frozen=True, tag=True):
    """News of a supervised child here."""

    event: bytes
    """msgpack of a `libra_supervisor.events.ChildEvent`, whose instants mean nothing elsewhere."""


class LoadSeen(msgspec.Struct, frozen=True, tag=True):
    """What a server's metrics say; None: it does not say that."""

    instance_id: InstanceId
    incarnation: Incarnation
    num_running: int | None
    num_waiting: int | None
    kv_use_fraction: float | None
    kv_capacity_tokens: int | None
    num_preemptions: int | None


class ServerReloaded(msgspec.Struct, frozen=True, tag=True):
    instance_id: InstanceId
    nonce: str
    ack: ReloadAck | None
    error: str


class ServersEnded(msgspec.Struct, frozen=True, tag=True):
    """After EndServers: none is left."""


class AgentStarted(msgspec.Struct, frozen=True, tag=True):
    attempt: int
    pid: int


class AgentEnded(msgspec.Struct, frozen=True, tag=True):
    """The agent and all its ranks are gone."""

    attempt: int
    exit_code: int | None
    signal: int | None
    reason: str
    last_lines: tuple[str, ...]
    survivors: tuple[int, ...] = ()
    """Processes that outlived SIGKILL."""


class RankLinked(msgspec.Struct, frozen=True, tag=True):
    """A rank has connected to the control socket here; its bytes follow."""

    attempt: int
    link: int
    """Tells the connections of this node apart."""


class FromRank(msgspec.Struct, frozen=True, tag=True):
    attempt: int
    link: int
    data: bytes


class RankUnlinked(msgspec.Struct, frozen=True, tag=True):
    attempt: int
    link: int


class NodeFailed(msgspec.Struct, frozen=True, tag=True):
    """The node cannot do what it was told, and another try would end the same way."""

    reason: str
    exit_code: int


NodeEvent: TypeAlias = (
    ChildSaid
    | LoadSeen
    | ServerReloaded
    | ServersEnded
    | AgentStarted
    | AgentEnded
    | RankLinked
    | FromRank
    | RankUnlinked
    | NodeFailed
)
