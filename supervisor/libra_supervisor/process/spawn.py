"""Starting a child: own session, own cgroup where possible, output to the log relay."""

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from fcntl import F_SETPIPE_SZ, fcntl
from typing import Final, Protocol

import anyio

from libra.errors import ChildError, SiteError
from libra.ids import ChildId, Incarnation, RunId
from libra_supervisor.process import exec_shim
from libra_supervisor.process.cgroup import Cgroup, CgroupRoot
from libra_supervisor.process.child import LinuxChild, RunningChild
from libra_supervisor.process.identity import ProcessIdentity, boot_id, read_row
from libra_supervisor.process.kernel import Kernel, read_tag
from libra_supervisor.process.logs import LogRelay
from libra_supervisor.process.spec import ProcessSpec, environment_of
from libra_supervisor.process.tree import Tree, TreeEnded, leftovers_ended

_PR_SET_CHILD_SUBREAPER: Final = 36
_PIPE_BYTES: Final = 1 << 20
_SHIM_ERROR_BYTES: Final = 4096
_SHIM_WAIT_S: Final = 30.0
"""Starting Python from a slow disk takes seconds; a shim that is stopped never gets there."""

_KILLED_WAIT_S: Final = 1.0


class Spawner(Protocol):
    async def spawn(self, spec: ProcessSpec, incarnation: Incarnation) -> RunningChild:
        """Start it. Raises ChildError with the reason when the program cannot be started."""
        ...

    async def adopt(
        self, child_id: ChildId, identity: ProcessIdentity, incarnation: Incarnation
    ) -> RunningChild | None:
        """Take over a process that an earlier supervisor of this run started as this child.

        None when it does not run any more, or when it is not that process.
        """
        ...

    async def clear(self, child_id: ChildId, kill_wait_s: float) -> TreeEnded:
        """End what earlier lives of this child left behind."""
        ...


class LinuxSpawner:
    """One per supervisor."""

    def __init__(
        self, *, run_id: RunId, logs: LogRelay, kernel: Kernel, cgroups: CgroupRoot | None
    ) -> None:
        self._run_id = run_id
        self._logs = logs
        self._kernel = kernel
        self._cgroups = cgroups

    async def spawn(self, spec: ProcessSpec, incarnation: Incarnation) -> RunningChild:
        cgroup = self._cgroups.make(spec.child_id) if self._cgroups is not None else None
        try:
            pid, pidfd = await self._start(spec, cgroup)
        except OSError as error:
            if cgroup is not None:
                cgroup.remove()
            raise ChildError(f"{spec.child_id} does not start: {_reason(error, spec)}") from error
        # It cannot be missing: the process is ours and nobody but us reaps it.
        row = read_row(pid)
        start_ticks = row.start_ticks if row is not None else 0
        identity = ProcessIdentity(pid, start_ticks, boot_id())
        return LinuxChild(
            child_id=spec.child_id,
            identity=identity,
            incarnation=incarnation,
            tree=self._tree(spec.child_id, identity, cgroup),
            logs=self._logs,
            pidfd=pidfd,
            is_own=True,
        )

    async def adopt(
        self, child_id: ChildId, identity: ProcessIdentity, incarnation: Incarnation
    ) -> RunningChild | None:
        try:
            pidfd = os.pidfd_open(identity.pid)
        except OSError:
            return None
        row = read_row(identity.pid)
        if (
            row is None
            or row.is_dead
            or ProcessIdentity(row.pid, row.start_ticks, boot_id()) != identity
            or read_tag(identity.pid) != (self._run_id, child_id)
        ):
            os.close(pidfd)
            return None
        cgroup = self._cgroups.of_process(identity.pid) if self._cgroups is not None else None
        return LinuxChild(
            child_id=child_id,
            identity=identity,
            incarnation=incarnation,
            tree=self._tree(child_id, identity, cgroup),
            logs=self._logs,
            pidfd=pidfd,
            is_own=False,
        )

    async def clear(self, child_id: ChildId, kill_wait_s: float) -> TreeEnded:
        return await leftovers_ended(
            run_id=self._run_id, child_id=child_id, kernel=self._kernel, kill_wait_s=kill_wait_s
        )

    def _tree(self, child_id: ChildId, identity: ProcessIdentity, cgroup: Cgroup | None) -> Tree:
        return Tree(
            identity, run_id=self._run_id, child_id=child_id, kernel=self._kernel, cgroup=cgroup
        )

    async def _start(self, spec: ProcessSpec, cgroup: Cgroup | None) -> tuple[int, int]:
        """Start the shim and wait until it became the program; (pid, pidfd). Raises OSError."""
        # A child that says nothing has a log too. Where there is no room for it, the relay says so.
        with suppress(OSError):
            os.close(os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640))
        out_read, out_write = _wide_pipe()
        err_read, err_write = _wide_pipe()
        status_read, status_write = os.pipe2(os.O_CLOEXEC)
        try:
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - a vfork: about a millisecond
                _shim_argv(spec, cgroup, status_write),
                env=environment_of(spec),
                cwd=spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=out_write,
                stderr=err_write,
                pass_fds=(status_write,),
                start_new_session=True,
            )
            pidfd = os.pidfd_open(process.pid)
            # From here on the pid is waited for through the pidfd, never by Popen.
            process.returncode = 0
        except OSError:
            _close((out_read, err_read, status_read))
            raise
        finally:
            _close((out_write, err_write, status_write))
        self._logs.attach(spec.child_id, spec.log_path, out_read, err_read)
        try:
            # Shielded: a process that was started is either returned or reaped.
            with anyio.CancelScope(shield=True):  # bounded by _SHIM_WAIT_S
                await _until_program_runs(pidfd, status_read)
        except OSError:
            self._logs.release(spec.child_id)
            os.close(pidfd)
            raise
        finally:
            os.close(status_read)
        return process.pid, pidfd


def become_subreaper() -> None:
    """Have orphans of our children re-parented to this process, where they are found and ended.

    Raises SiteError when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise SiteError(
            f"prctl(PR_SET_CHILD_SUBREAPER) failed: {reason}; Linux 3.4 or newer is needed"
        )


async def _until_program_runs(pidfd: int, status_read: int) -> None:
    """Return at exec; raise the shim's error as OSError, with the shim reaped."""
    with anyio.move_on_after(_SHIM_WAIT_S) as wait:
        await anyio.wait_readable(status_read)
    if wait.cancelled_caught:
        await _kill_shim(pidfd)
        raise TimeoutError(f"did not get as far as its program within {_SHIM_WAIT_S:g} s")
    message = os.read(status_read, _SHIM_ERROR_BYTES)
    if message:
        await anyio.wait_readable(pidfd)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)  # noqa: ASYNC222 - it has ended
        raise OSError(message.decode("utf-8", "replace"))


async def _kill_shim(pidfd: int) -> None:
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    # One that waits for a disk that is gone ends when it can, and is reaped as an orphan then.
    with anyio.move_on_after(_KILLED_WAIT_S):
        await anyio.wait_readable(pidfd)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)  # noqa: ASYNC222 - it has ended


def _shim_argv(spec: ProcessSpec, cgroup: Cgroup | None, status_fd: int) -> list[str]:
    limits = spec.limits
    settings = {
        "status_fd": status_fd,
        "cgroup": cgroup.path if cgroup is not None else None,
        "bound_to": os.getpid() if spec.is_bound_to_supervisor else None,
        "address_space_bytes": limits.address_space_bytes,
        "num_open_files": limits.num_open_files,
        "core_dump_bytes": limits.core_dump_bytes,
        "cpu_cores": limits.cpu_cores,
        "nice": limits.nice,
        "oom_score_adjust": limits.oom_score_adjust,
    }
    shim = exec_shim.__file__
    return [sys.executable, "-I", "-S", shim, json.dumps(settings), *spec.argv]


def _wide_pipe() -> tuple[int, int]:
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    # A user's pipes may be capped in total; the default size works, with more wake-ups.
    with suppress(PermissionError):
        fcntl(write_fd, F_SETPIPE_SZ, _PIPE_BYTES)
    return read_fd, write_fd


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _reason(error: OSError, spec: ProcessSpec) -> str:
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        return f"{error.strerror}; the machine is out of processes or memory"
    return f"{error.strerror or error} (program {spec.argv[0]}, directory {spec.cwd})"
