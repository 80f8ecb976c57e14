"""The run directory: its paths, and the lock that keeps a second supervisor out."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from libra.errors import SiteError
from libra.ids import ChildId, Incarnation, PolicyVersion
from libra_supervisor.journal import RUN_ID_NAME

LOCK_NAME = "supervisor.lock"


class RunDirectory(msgspec.Struct, frozen=True):
    """Paths below one run's root. Nothing else in Libra composes them."""

    root: Path
    """Absolute."""

    @property
    def given_config(self) -> Path:
        return self.root / "config.given.yaml"

    @property
    def resolved_config(self) -> Path:
        return self.root / "config.resolved.yaml"

    @property
    def resolved_config_json(self) -> Path:
        """The same for child processes, in the form that needs no YAML reader."""
        return self.root / "config.resolved.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def calibration(self) -> Path:
        """The measured factors that the plan was made with."""
        return self.root / "calibration.json"

    @property
    def run_id(self) -> Path:
        return self.root / RUN_ID_NAME

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def journal(self) -> Path:
        return self.root / "journal.jsonl"

    @property
    def control_socket(self) -> Path:
        return self.root / "control.sock"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def control_log(self) -> Path:
        return self.logs / "control.jsonl"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations.jsonl"

    @property
    def reloads(self) -> Path:
        return self.root / "reloads.jsonl"

    @property
    def reconfigurations(self) -> Path:
        return self.root / "reconfigurations.jsonl"

    @property
    def trajectories(self) -> Path:
        return self.root / "trajectories"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def prewarm(self) -> Path:
        """Where servers that wait for their devices are told to go on."""
        return self.root / "prewarm"

    def go_file_of(self, incarnation: Incarnation) -> Path:
        return self.prewarm / incarnation

    @property
    def hybrid(self) -> Path:
        """Of hybrid replicas: the lanes' key, snapshots on their way, sockets; mode 0700."""
        return self.root / "hybrid"

    @property
    def shared_load(self) -> Path:
        """What each node's scheduler has in flight, when no other place is configured."""
        return self.root / "load"

    @property
    def phase_trace(self) -> Path:
        return self.root / "phase_trace"

    @property
    def token(self) -> Path:
        """Bearer token of the control API and of the servers' guarded routes; mode 0600."""
        return self.root / "token"

    def log_of(self, child_id: ChildId) -> Path:
        return self.logs / f"{child_id}.log"

    def weights_of(self, version: PolicyVersion) -> Path:
        return self.weights / f"v{version:06d}"

    def checkpoint_of(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def trajectories_of(self, step: int) -> Path:
        return self.trajectories / f"step_{step:06d}.jsonl"

    def evaluated_of(self, version: PolicyVersion) -> Path:
        return self.trajectories / f"eval_v{version:06d}.jsonl"

    def create(self) -> bool:
        """Make the directory and its fixed folders; existing ones are kept. True when it is new.

        Raises SiteError when that is not possible there.
        """
        folders = (self.logs, self.trajectories, self.weights, self.checkpoints, self.phase_trace)
        try:
            is_new = _make(self.root)
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SiteError(
                f"the run directory {self.root} cannot be made: {error.strerror}; "
                "choose another --run-dir"
            ) from error
        return is_new


class Holder(msgspec.Struct, frozen=True):
    """Who holds a run directory; written into the lock file."""

    pid: int
    host: str


class DirectoryHeldError(SiteError):
    """Another supervisor has the directory."""

    def __init__(self, message: str, holder: Holder | None) -> None:
        super().__init__(message)
        self.holder = holder
        """None when it has not said yet who it is."""


@contextmanager
def held(directory: RunDirectory) -> Iterator[None]:
    """Hold the run directory for as long as the block runs.

    Raises DirectoryHeldError when another supervisor has it. The kernel drops the lock when the
    process ends, however it ends.
    """
    descriptor = os.open(directory.root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder_in(descriptor)
            raise DirectoryHeldError(
                f"{directory.root} is in use by {in_words(holder)}; stop it first "
                f"(libra-supervisor stop --run-dir {directory.root}) or choose another --run-dir",
                holder,
            ) from None
        os.ftruncate(descriptor, 0)
        holder = Holder(pid=os.getpid(), host=os.uname().nodename)
        os.pwrite(descriptor, msgspec.json.encode(holder), 0)
        yield
    finally:
        os.close(descriptor)


def holder_of(directory: RunDirectory) -> str | None:
    """Who holds the directory, in words; None when nobody does.

    Only looks: to try the lock would turn away a supervisor that starts at that moment.
    """
    holder, path = last_holder(directory), directory.root / LOCK_NAME
    return None if holder is None or not _has_open(holder.pid, path) else in_words(holder)


def last_holder(directory: RunDirectory) -> Holder | None:
    """Who held the directory last, and may hold it yet; None when nobody did."""
    try:
        return msgspec.json.decode((directory.root / LOCK_NAME).read_bytes(), type=Holder)
    except (OSError, msgspec.DecodeError):
        return None


def held_by(pid: int) -> RunDirectory | None:
    """The run directory that the process holds; None when it is no supervisor that can be seen."""
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if (path := entry.readlink()).name == LOCK_NAME:
                    return RunDirectory(path.parent)
    except OSError:
        return None
    return None


def _make(root: Path) -> bool:
    """Make the directory; False when it was there. Of several callers one is told True."""
    try:
        root.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def _has_open(pid: int, path: Path) -> bool:
    try:
        return any(entry.readlink() == path for entry in Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        return True  # another user's process on that pid: it cannot be ruled out
    except OSError:
        return False


def _holder_in(descriptor: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Holder)
    except msgspec.DecodeError:
        return None


def in_words(holder: Holder | None) -> str:
    if holder is None:
        return "another libra-supervisor"
    return f"libra-supervisor pid {holder.pid} on {holder.host}"
