"""What to start: a child's argv, environment, working directory, log and limits."""

from collections.abc import Mapping
from typing import Final

import msgspec

from libra.ids import ChildId, RunId

RUN_TAG: Final = "LIBRA_RUN_ID"
CHILD_TAG: Final = "LIBRA_CHILD_ID"

_OURS_ALONE: Final = frozenset(
    {
        # A child that inherits these would speak to systemd in our name.
        "NOTIFY_SOCKET",
        "WATCHDOG_PID",
        "WATCHDOG_USEC",
        "LISTEN_FDS",
        "LISTEN_FDNAMES",
        "LISTEN_PID",
        # The secret of the nodes; what a child runs is the user's code.
        "LIBRA_NODE_TOKEN",
        # stderr of a child is our pipe, not the journal.
        "JOURNAL_STREAM",
        "INVOCATION_ID",
        "MAINPID",
        "MANAGERPID",
    }
)
_PROXIES: Final = frozenset(
    {"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "socks_proxy", "no_proxy"}
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds set inside the child before its program starts; None leaves the inherited one."""

    address_space_bytes: int | None = None
    num_open_files: int | None = None
    core_dump_bytes: int | None = 0
    """A core file of a process with a GPU's worth of host memory fills the disk; None allows it."""

    cpu_cores: tuple[int, ...] = ()
    """Cores the child may run on; empty leaves all."""

    nice: int = 0
    oom_score_adjust: int | None = None


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One start of one child. `env` is the whole environment, cleaned by `environment_of`."""

    child_id: ChildId
    run_id: RunId
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    log_path: str
    limits: Limits = msgspec.field(default_factory=Limits)
    is_bound_to_supervisor: bool = False
    """SIGKILL the process when the supervisor dies (PR_SET_PDEATHSIG): for children that nobody
    can adopt. Servers that outlive a crash of the supervisor leave it False."""

    keeps_proxy: bool = False
    """Leave proxy variables in place, for code that must reach the outside."""


def environment_of(spec: ProcessSpec) -> dict[str, str]:
    """Make the process's environment: `spec.env` without what is ours alone, plus the tags."""
    return {
        **without_inherited(spec.env, keeps_proxy=spec.keeps_proxy),
        RUN_TAG: spec.run_id,
        CHILD_TAG: spec.child_id,
        # A program that sets its title (vLLM's EngineCore and workers) writes over its environment,
        # and the tags with it; this keeps the setproctitle package to the space of its arguments.
        "SPT_NOENV": "1",
    }


def without_inherited(env: Mapping[str, str], *, keeps_proxy: bool) -> dict[str, str]:
    dropped = _OURS_ALONE if keeps_proxy else _OURS_ALONE | _PROXIES
    return {
        name: value
        for name, value in env.items()
        if name not in dropped and (keeps_proxy or name.lower() not in _PROXIES)
    }
