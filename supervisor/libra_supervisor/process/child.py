"""One live process of one child: waiting for its end, its last words, letting go of its pid."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import anyio
import msgspec

from libra.ids import ChildId, Incarnation
from libra_supervisor.process.identity import ProcessIdentity
from libra_supervisor.process.logs import LogRelay
from libra_supervisor.process.tree import EndableTree, Tree

_VMSTAT: Final = Path("/proc/vmstat")


class ExitStatus(msgspec.Struct, frozen=True):
    """How a process ended. Both None: another process was its parent and got its status."""

    exit_code: int | None
    signal: int | None
    is_out_of_memory: bool = False
    """Killed by SIGKILL while the machine's count of out-of-memory kills rose."""

    why: str = ""
    """What ended it, where that is not its own status: its node was lost."""

    def __str__(self) -> str:
        if self.why:
            return self.why
        if self.signal is not None:
            why = " (the kernel's out-of-memory killer ran)" if self.is_out_of_memory else ""
            return f"killed by {_signal_name(self.signal)}{why}"
        if self.exit_code is not None:
            return f"exited with code {self.exit_code}"
        return "ended (adopted, so its status is unknown)"


class RunningChild(Protocol):
    """What supervision needs of a process; `LinuxChild` is the real one."""

    @property
    def child_id(self) -> ChildId: ...

    @property
    def identity(self) -> ProcessIdentity: ...

    @property
    def incarnation(self) -> Incarnation: ...

    @property
    def tree(self) -> EndableTree: ...

    async def wait(self) -> ExitStatus:
        """Until the process has ended; it may be called again, by one task at a time."""
        ...

    async def last_lines(self, num_lines: int) -> tuple[str, ...]: ...

    def attach_rank(self, rank: int, out_fd: int, err_fd: int) -> None:
        """Have a rank's own pipes drained into this child's log; takes the descriptors."""
        ...

    def reap(self) -> None:
        """Release the pid and the pipes. Once, when the tree has ended."""
        ...


class LinuxChild:
    """A process watched through a pidfd; stays a zombie until `reap`."""

    def __init__(  # noqa: PLR0913 - one value per property, all from the spawner
        self,
        *,
        child_id: ChildId,
        identity: ProcessIdentity,
        incarnation: Incarnation,
        tree: Tree,
        logs: LogRelay,
        pidfd: int,
        is_own: bool,
    ) -> None:
        self.child_id = child_id
        self.identity = identity
        self.incarnation = incarnation
        self.tree = tree
        self._logs = logs
        self._pidfd = pidfd
        self._is_own = is_own
        self._oom_kills_at_start = num_oom_kills()
        self._status: ExitStatus | None = None

    async def wait(self) -> ExitStatus:
        if self._status is None:
            await anyio.wait_readable(self._pidfd)
            self._status = self._read_status() if self._is_own else ExitStatus(None, None)
        return self._status

    def _read_status(self) -> ExitStatus:
        try:
            # WNOWAIT leaves the zombie, and with it the pid and the session number.
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            result = None
        if result is None:
            return ExitStatus(None, None)
        if result.si_code == os.CLD_EXITED:
            return ExitStatus(result.si_status, None)
        is_oom = result.si_status == signal.SIGKILL and num_oom_kills() > self._oom_kills_at_start
        return ExitStatus(None, result.si_status, is_oom)

    async def last_lines(self, num_lines: int) -> tuple[str, ...]:
        return await self._logs.tail(self.child_id, num_lines)

    def attach_rank(self, rank: int, out_fd: int, err_fd: int) -> None:
        self._logs.attach_rank(self.child_id, rank, out_fd, err_fd)

    def reap(self) -> None:
        if self._is_own:
            # WNOHANG: an unkillable process is left to whoever inherits it.
            with suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        os.close(self._pidfd)
        self._logs.release(self.child_id)


def num_oom_kills() -> int:
    """Count what the out-of-memory killer ended since boot, on the whole machine."""
    for line in _VMSTAT.read_text(encoding="ascii").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
