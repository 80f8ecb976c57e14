"""What the leader and a follower say to each other over their one connection.

The follower opens a WebSocket at `NODE_PATH` with the token of the nodes as bearer. Its first
message is a Hello, the answer a Welcome or a Refused; after a Welcome every message, in both
directions, is an Envelope. All are msgpack. No time of one host ever means anything on the other:
what has to be counted is counted in beats.
"""

from typing import Final, TypeAlias

import msgspec

from libra.ids import ChildId, Incarnation, NodeRank, RunId
from libra.wire.instance import WeightsReceipt
from libra.wire.node_rollouts import RolloutOrder, RolloutWord
from libra.wire.rank import Hello as RankHello

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

    option_digests: dict[str, str] = {}
    """The same by option, for whoever wonders in what two of them differ."""

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

    session: str = ""
    """Empty: a new one. Nothing that was done in an earlier one is owed any more."""

    received: int = 0
    """Number of the newest message of the session that has come in here."""

    term: int = 0
    """The highest that it has obeyed."""

    children: tuple[ChildId, ...] = ()
    """What still runs here."""


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


# Commands. What has an answer carries the number of the call, which the answer repeats.


class KeepOnly(msgspec.Struct, frozen=True, tag=True):
    """First of a session: end whatever runs here but these children, which may be adopted."""

    children: tuple[ChildId, ...]


class Start(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Start a child, after whatever still runs under its name has ended. Started or Failed."""

    call: int
    child_id: ChildId
    incarnation: Incarnation
    argv: tuple[str, ...]
    env: dict[str, str]
    """Over this node's own environment. CUDA_VISIBLE_DEVICES names slots, which are looked up
    among the node's own devices."""

    cwd: str
    log_path: str
    cpu_cores: tuple[int, ...]
    is_bound: bool
    """It must not outlive the lease: ranks."""


class Adopt(msgspec.Struct, frozen=True, tag=True):
    """Say whether this very process runs here. Started or Failed."""

    call: int
    child_id: ChildId
    incarnation: Incarnation
    pid: int
    start_ticks: int


class Clear(msgspec.Struct, frozen=True, tag=True):
    """End what earlier lives of a child left. TreeGone."""

    call: int
    child_id: ChildId
    kill_wait_s: float


class End(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """End a child with everything it started. TreeGone."""

    call: int
    incarnation: Incarnation
    term_grace_s: float
    kill_wait_s: float
    hurried_grace_s: float


class Hurry(msgspec.Struct, frozen=True, tag=True):
    """Shorten what is left of the grace of an `End` that is going on."""

    incarnation: Incarnation


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Let go of the pid and the pipes of a child that has ended."""

    incarnation: Incarnation


class Tail(msgspec.Struct, frozen=True, tag=True):
    """The last lines that a child printed. Lines."""

    call: int
    incarnation: Incarnation
    num_lines: int


class HoldPort(msgspec.Struct, frozen=True, tag=True):
    """Hold a port of this node, any for 0, until FreePort. PortHeld or Failed."""

    call: int
    host: str
    port: int


class FreePort(msgspec.Struct, frozen=True, tag=True):
    port: int


class LookAtDevices(msgspec.Struct, frozen=True, tag=True):
    """How much memory of the devices behind these slots is in use. DevicesSeen or Failed."""

    call: int
    slots: tuple[int, ...]


class ReadWeights(msgspec.Struct, frozen=True, tag=True):
    """Read every byte of a published version and compare it. WeightsRead or Failed."""

    call: int
    directory: str
    manifest_hash: str


class ToRank(msgspec.Struct, frozen=True, tag=True):
    """The next bytes for a rank's control socket."""

    link: int
    data: bytes


class DropRank(msgspec.Struct, frozen=True, tag=True):
    """Close a rank's control socket, so that the rank ends."""

    link: int


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The run is over: end what still runs and leave with this exit code."""

    exit_code: int
    reason: str


NodeCommand: TypeAlias = (
    KeepOnly
    | Start
    | Adopt
    | Clear
    | End
    | Hurry
    | Forget
    | Tail
    | HoldPort
    | FreePort
    | LookAtDevices
    | ReadWeights
    | ToRank
    | DropRank
    | Leave
    | RolloutOrder
)


# Events: answers of calls, and news


class Started(msgspec.Struct, frozen=True, tag=True):
    call: int
    pid: int
    start_ticks: int
    boot_id: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What was asked for cannot be, now."""

    call: int
    reason: str


class TreeGone(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    call: int
    survivors: tuple[int, ...]
    """Processes that outlived SIGKILL."""

    detail: str
    num_killed: int
    ended_in_grace: bool
    took_s: float


class Lines(msgspec.Struct, frozen=True, tag=True):
    call: int
    lines: tuple[str, ...]


class PortHeld(msgspec.Struct, frozen=True, tag=True):
    call: int
    port: int


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Of one device, at one moment."""

    device: str
    used_bytes: int
    total_bytes: int
    pids: tuple[int, ...]
    """Who holds it, as far as the driver tells; inside a container often nobody or foreign pids."""


class DevicesSeen(msgspec.Struct, frozen=True, tag=True):
    call: int
    devices: tuple[DeviceMemory, ...]
    """Of the slots, but for devices that other slots stand for too."""

    why_blind: str
    """Why the driver does not tell; empty when it does."""


class WeightsRead(msgspec.Struct, frozen=True, tag=True):
    call: int
    receipt: WeightsReceipt | None
    """None where the file system allows none."""


NodeReply: TypeAlias = Started | Failed | TreeGone | Lines | PortHeld | DevicesSeen | WeightsRead


class ProcessEnded(msgspec.Struct, frozen=True, tag=True):
    """A child's first process has ended; what it started may still run."""

    incarnation: Incarnation
    exit_code: int | None
    signal: int | None
    is_out_of_memory: bool


class RankLinked(msgspec.Struct, frozen=True, tag=True):
    """A rank has connected here and said Hello."""

    link: int
    """Tells the connections of this node apart."""

    hello: RankHello


class FromRank(msgspec.Struct, frozen=True, tag=True):
    """One event of a rank, msgpack as on its control socket."""

    link: int
    event: bytes


class RankUnlinked(msgspec.Struct, frozen=True, tag=True):
    """The rank's connection has ended; empty when cleanly."""

    link: int
    error: str


class StopAsked(msgspec.Struct, frozen=True, tag=True):
    """Somebody stops this node's supervisor: the run saves and ends."""

    reason: str
    in_hurry: bool
    exit_code: int = 0
    """Of the run, if it comes to its end by this."""


class Unfit(msgspec.Struct, frozen=True, tag=True):
    """What the node lacks for its part of the plan: it leaves."""

    reason: str


NodeEvent: TypeAlias = (
    NodeReply
    | ProcessEnded
    | RankLinked
    | FromRank
    | RankUnlinked
    | StopAsked
    | Unfit
    | RolloutWord
)
