"""What Libra takes from environment variables, read in one place. Nothing else reads them."""

from collections.abc import Mapping

import msgspec

from libra.config.problems import ConfigProblemsError, Place, Problem

TRACE_VARIABLE = "RL_TRAIN_PHASE_TRACE"
TRACE_DIRECTORY_VARIABLE = "RL_TRAIN_PHASE_TRACE_DIR"
NODE_TOKEN_VARIABLE = "LIBRA_NODE_TOKEN"  # noqa: S105 - a name
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True} | {
    "0": False, "false": False, "no": False, "off": False
}  # fmt: skip


class SlurmEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The job this process runs in. Counts are of nodes and tasks, ranks from 0."""

    job_id: int
    step_id: str = ""
    """Empty in a batch script outside srun."""

    num_job_nodes: int = 1
    num_step_nodes: int = 1
    """Nodes of the srun step; 1 outside srun."""

    node_rank: int = 0
    node_list: str = ""
    """Of the job, as Slurm writes it: `gpu[01-04,7],login1`."""

    step_node_list: str = ""
    """Of the srun step; empty outside srun."""

    num_tasks: int = 1
    task_rank: int = 0
    num_cpus_on_node: int | None = None
    gpus: tuple[str, ...] = ()
    """Devices granted on this node, as Slurm names them."""

    restart_count: int = 0
    """How often the job was requeued."""

    end_time_s: int | None = None
    """Unix time of the job's limit."""


class TorchrunEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """What torchrun tells a rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int = 0
    """Rank of the node's agent."""

    master_addr: str = ""
    master_port: int = 0
    run_id: str = ""
    restart_count: int = 0


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Everything read; None where the variables are absent."""

    phase_trace: bool | None = None
    phase_trace_dir: str | None = None
    home: str | None = None
    data_home: str | None = None
    """Where a user's programs keep what they learned; None: below `home`."""

    cuda_visible_devices: tuple[str, ...] | None = None
    """None: all devices; empty: none."""

    node_token: str = ""
    """The secret that the nodes of a run share; empty when it is not handed on this way."""

    credentials_directory: str | None = None
    """Where systemd put this unit's credentials."""

    slurm: SlurmEnvironment | None = None
    torchrun: TorchrunEnvironment | None = None


def read_environment(environ: Mapping[str, str]) -> Environment:
    """Raise ConfigProblemsError naming every variable whose value makes no sense."""
    reader = _Reader(environ)
    found = Environment(
        phase_trace=reader.boolean(TRACE_VARIABLE),
        phase_trace_dir=environ.get(TRACE_DIRECTORY_VARIABLE) or None,
        home=environ.get("HOME") or None,
        data_home=environ.get("XDG_DATA_HOME") or None,
        cuda_visible_devices=_devices(environ.get("CUDA_VISIBLE_DEVICES")),
        node_token=environ.get(NODE_TOKEN_VARIABLE, ""),
        credentials_directory=environ.get("CREDENTIALS_DIRECTORY") or None,
        slurm=_slurm(reader) if "SLURM_JOB_ID" in environ else None,
        torchrun=_torchrun(reader)
        if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environ.keys()
        else None,
    )
    if reader.problems:
        raise ConfigProblemsError(reader.problems, subject="environment")
    return found


def _slurm(reader: "_Reader") -> SlurmEnvironment:
    return SlurmEnvironment(
        job_id=reader.count("SLURM_JOB_ID", 0),
        step_id=reader.text("SLURM_STEP_ID"),
        num_job_nodes=reader.count("SLURM_JOB_NUM_NODES", reader.count("SLURM_NNODES", 1)),
        num_step_nodes=reader.count("SLURM_STEP_NUM_NODES", 1),
        node_rank=reader.count("SLURM_NODEID", 0),
        node_list=reader.text("SLURM_JOB_NODELIST"),
        step_node_list=reader.text("SLURM_STEP_NODELIST"),
        num_tasks=reader.count("SLURM_NTASKS", 1),
        task_rank=reader.count("SLURM_PROCID", 0),
        num_cpus_on_node=reader.optional_count("SLURM_CPUS_ON_NODE"),
        gpus=_devices(reader.text("SLURM_STEP_GPUS") or reader.text("SLURM_JOB_GPUS")) or (),
        restart_count=reader.count("SLURM_RESTART_COUNT", 0),
        end_time_s=reader.optional_count("SLURM_JOB_END_TIME"),
    )


def _torchrun(reader: "_Reader") -> TorchrunEnvironment:
    return TorchrunEnvironment(
        rank=reader.count("RANK", 0),
        world_size=reader.count("WORLD_SIZE", 1),
        local_rank=reader.count("LOCAL_RANK", 0),
        local_world_size=reader.count("LOCAL_WORLD_SIZE", 1),
        group_rank=reader.count("GROUP_RANK", 0),
        master_addr=reader.text("MASTER_ADDR"),
        master_port=reader.count("MASTER_PORT", 0),
        run_id=reader.text("TORCHELASTIC_RUN_ID"),
        restart_count=reader.count("TORCHELASTIC_RESTART_COUNT", 0),
    )


def _devices(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(part.strip() for part in text.split(",") if part.strip())


class _Reader:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self.problems: list[Problem] = []
        self._environ = environ

    def text(self, name: str) -> str:
        return self._environ.get(name, "")

    def boolean(self, name: str) -> bool | None:
        text = self.text(name).strip().lower()
        if not text:
            return None
        if text not in _BOOLEANS:
            self._report(name, f"wants 1 or 0, got {text!r}")
        return _BOOLEANS.get(text)

    def count(self, name: str, default: int) -> int:
        found = self.optional_count(name)
        return default if found is None else found

    def optional_count(self, name: str) -> int | None:
        text = self.text(name).strip()
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= 18):  # noqa: PLR2004 - 64 bits
            self._report(name, f"wants a whole number, got {text[:40]!r}")
            return None
        return int(text)

    def _report(self, name: str, what: str) -> None:
        place = Place(f"environment {name}")
        self.problems.append(Problem(path=name, what=what, place=place, hint="unset it or fix it"))
