"""From a placement to the process that runs the ranks: torchrun, started anew for each attempt.

torchrun's own restarts are off: one restart budget per gang, ours. The port of the ranks' store
(MASTER_PORT) is bound by torchrun's agent to port 0 and held by it for its whole life; nobody
picks a number, lets go of it and hopes.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from libra.ids import ChildId, Incarnation, NodeRank, RunId
from libra.planner.plan import TrainPlacement
from libra_supervisor.process.spec import Limits, ProcessSpec
from libra_supervisor.run_directory import RunDirectory

TRAINER_ID: Final = ChildId("trainer")
ERROR_FILES: Final = "torchrun"
_NO_PORT: Final = "--master-port=0"
MAX_THREADS_BESIDE_GPU: Final = 8


class AgentSite(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part of a gang that lies on several."""

    node: NodeRank
    host: str
    """Under which the others reach it."""

    num_ranks: int
    """Ranks of the gang are counted through the agents in their order."""

    env: dict[str, str]
    """What its ranks have beyond the gang's: on another node over that node's own."""

    visible_devices: tuple[str, ...] = ()
    """As of the gang, by local rank."""


class GangSpec(ProcessSpec, frozen=True, kw_only=True):
    """One attempt on several nodes; what is said besides `parts` is the first one's."""

    parts: tuple[tuple[NodeRank, ProcessSpec], ...]


class GangSite(msgspec.Struct, frozen=True, kw_only=True):
    """What every attempt of one gang has in common."""

    run_id: RunId
    directory: RunDirectory
    placement: TrainPlacement
    device: Literal["cpu", "cuda"]
    env: dict[str, str]
    """The environment the supervisor was started with."""

    cpu_cores: tuple[int, ...] = ()
    """Cores of the whole gang; empty leaves all."""

    rank_cores: tuple[tuple[int, ...], ...] = ()
    """By local rank: cores beside its device, to which the rank binds itself; none leaves all."""

    visible_devices: tuple[str, ...] = ()
    """For CUDA_VISIBLE_DEVICES, one per slot of the placement; empty leaves the variable alone."""

    agents: tuple[AgentSite, ...] = ()
    """Where the ranks lie when not all are here; empty: one agent, on this node."""

    launcher: tuple[str, ...] = (sys.executable, "-m", "torch.distributed.run")
    program: tuple[str, ...] = ("-m", "libra.trainer")
    child_id: ChildId = TRAINER_ID
    arguments: tuple[str, ...] = ()
    """For the program, after the ones that every gang has."""

    is_restarted: bool = True
    """False: the first loss is the last."""

    socket_directory: Path | None = None
    """Where its ranks' socket lives; None: the run's directory, which is the core's."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One start of all ranks."""

    number: int
    incarnation: Incarnation
    control_socket: str
    restore: Path | None
    """A complete checkpoint; None starts anew."""

    shutdown_grace_s: float
    """How long torchrun lets ranks end after SIGTERM; shorter than the supervisor's own grace, so
    that torchrun ends its ranks and says how before it is killed itself."""


def attempt_spec(site: GangSite, attempt: Attempt) -> ProcessSpec:
    """The process that runs the ranks of one attempt; a GangSpec when there are several."""
    if not site.agents:
        return _spec(site, attempt, _alone(site, attempt), site.child_id)
    parts = tuple(
        (agent.node, _part(site, attempt, number)) for number, agent in enumerate(site.agents)
    )
    return GangSpec(**msgspec.structs.asdict(parts[0][1]), parts=parts)


def with_port(spec: ProcessSpec, port: int) -> ProcessSpec:
    """One part of an attempt, told the port on which its first agent holds the ranks' store."""
    argv = tuple(f"--master-port={port}" if word == _NO_PORT else word for word in spec.argv)
    return msgspec.structs.replace(spec, argv=argv)


def _part(site: GangSite, attempt: Attempt, number: int) -> ProcessSpec:
    agent = site.agents[number]
    own = msgspec.structs.replace(
        site, env={**site.env, **agent.env}, visible_devices=agent.visible_devices, rank_cores=()
    )
    child_id = site.child_id if agent.node == 0 else ChildId(f"{site.child_id}-{agent.node}")
    return _spec(own, attempt, _among_others(site, attempt, number), child_id)


def is_of_core(child_id: ChildId) -> bool:
    """Whether ranks of the core run under it, on this node or another."""
    name, _, node = child_id.partition("-")
    return name == TRAINER_ID and (child_id == TRAINER_ID or node.isdecimal())


def _spec(
    site: GangSite, attempt: Attempt, torchrun: tuple[str, ...], child_id: ChildId
) -> ProcessSpec:
    directory = site.directory
    restore = () if attempt.restore is None else ("--restore", str(attempt.restore))
    return ProcessSpec(
        child_id=child_id,
        run_id=site.run_id,
        argv=(
            *torchrun,
            *site.program,
            "--config",
            str(directory.resolved_config_json),
            "--run-dir",
            str(directory.root),
            *restore,
            *site.arguments,
        ),
        env=_environment(site, attempt),
        cwd=str(directory.root),
        log_path=str(directory.log_of(child_id)),
        limits=Limits(cpu_cores=site.cpu_cores),
        # Nobody adopts a torchrun: without its supervisor it must not go on.
        is_bound_to_supervisor=True,
    )


def error_directory(directory: RunDirectory, incarnation: Incarnation) -> Path:
    """Where torchrun keeps the error files of one attempt's ranks."""
    return directory.logs / ERROR_FILES / incarnation


def _among_others(site: GangSite, attempt: Attempt, number: int) -> tuple[str, ...]:
    """An agent that meets the others at the first one's host.

    The static rendezvous gives each agent the ranks of its place; the other kinds number agents as
    they come.
    """
    agent = site.agents[number]
    return (
        *site.launcher,
        f"--nnodes={len(site.agents)}",
        f"--node-rank={number}",
        f"--nproc-per-node={agent.num_ranks}",
        "--max-restarts=0",
        "--rdzv-backend=static",
        f"--master-addr={site.agents[0].host}",
        _NO_PORT,
        f"--rdzv-id={site.run_id}-{attempt.incarnation}",
        f"--local-addr={agent.host}",
        f"--log-dir={error_directory(site.directory, attempt.incarnation)}",
    )


def _alone(site: GangSite, attempt: Attempt) -> tuple[str, ...]:
    return (
        *site.launcher,
        "--nnodes=1",
        f"--nproc-per-node={site.placement.world_size}",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        # A fresh id per attempt: what is left of an earlier one can never meet this one.
        f"--rdzv-id={site.run_id}-{attempt.incarnation}",
        "--local-addr=127.0.0.1",
        f"--log-dir={error_directory(site.directory, attempt.incarnation)}",
    )


def _environment(site: GangSite, attempt: Attempt) -> dict[str, str]:
    env = dict(site.env)
    env |= {
        "LIBRA_CONTROL": attempt.control_socket,
        "LIBRA_ATTEMPT": str(attempt.number),
        "LIBRA_ATTEMPT_ID": attempt.incarnation,
        "LIBRA_GANG": site.child_id,
        # The agent's bound store is the ranks' store: this is what holds MASTER_PORT.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0",
        # As a variable, because older torchruns have no such argument and ignore this.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, round(attempt.shutdown_grace_s))),
        "OMP_NUM_THREADS": str(_threads_per_rank(site)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if site.agents:
        # Where rank 0 listens for servers of other nodes, which come for weights.
        env["LIBRA_RANK_0_HOST"] = site.agents[0].host
    if site.device == "cpu":
        env |= {
            # Megatron's fused functions go through torch.compile, which gains nothing here.
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        if not site.agents:
            # Without it gloo resolves the host's name, which may not be reachable.
            env["GLOO_SOCKET_IFNAME"] = "lo"
        return env
    # Host memory for a checkpoint is new each time: huge pages are there ten times sooner.
    env["THP_MEM_ALLOC_ENABLE"] = "1"
    if site.visible_devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(site.visible_devices)
    if any(site.rank_cores):
        env["LIBRA_RANK_CORES"] = ";".join(",".join(map(str, it)) for it in site.rank_cores)
    return env


def _threads_per_rank(site: GangSite) -> int:
    """Each rank's share of the cores; beside a GPU a few, which copy what is saved."""
    num_ranks = site.placement.world_size
    if site.device == "cpu":
        return max(1, len(site.cpu_cores) // num_ranks)
    if any(site.rank_cores):
        share = min(map(len, site.rank_cores))
    else:
        share = len(os.sched_getaffinity(0)) // num_ranks
    return max(1, min(MAX_THREADS_BESIDE_GPU, share))


class RankError(msgspec.Struct, frozen=True):
    """The error file of one rank."""

    local_rank: int
    message: str
    timestamp: float


def first_error(directory: RunDirectory, incarnation: Incarnation) -> RankError | None:
    """The earliest error file of the attempt; None when no rank wrote one."""
    errors = [
        error
        for path in error_directory(directory, incarnation).glob("*/attempt_*/*/error.json")
        if (error := _read_error(path)) is not None
    ]
    return min(errors, key=lambda error: error.timestamp, default=None)


def _read_error(path: Path) -> RankError | None:
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        message = content["message"]
        if isinstance(message, str):
            return RankError(int(path.parent.name), message, path.stat().st_mtime)
        details = msgspec.convert(message, _ErrorMessage)
    except (OSError, KeyError, ValueError, msgspec.MsgspecError):
        return None
    return RankError(int(path.parent.name), details.message, float(details.timestamp))


class _ErrorMessage(msgspec.Struct):
    message: str
    extra: Mapping[str, str] = msgspec.field(name="extraInfo", default_factory=dict)

    @property
    def timestamp(self) -> str:
        return self.extra.get("timestamp", "0")
