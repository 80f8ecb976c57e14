"""Why a gang fell, in one sentence, from what its ranks and torchrun left behind. Pure."""

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from libra.wire.rank import RankFailed
from libra_supervisor.ranks.torchrun import RankError

_RANK: Final = re.compile(r"^\s*rank\s*:\s*(\d+)")
_EXIT_CODE: Final = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)")
_ROOT_CAUSE: Final = "Root Cause"
_KILLED: Final = -9


class RootCause(msgspec.Struct, frozen=True):
    """What torchrun names as the first failure."""

    rank: int
    exit_code: int
    """Negative: minus the signal."""


def root_cause(last_lines: Sequence[str]) -> RootCause | None:
    """Read torchrun's report; None when it printed none."""
    start = next((k for k, line in enumerate(last_lines) if _ROOT_CAUSE in line), None)
    if start is None:
        return None
    rank = exit_code = None
    for line in last_lines[start:]:
        if (found := _RANK.match(line)) is not None:
            rank = int(found[1])
        elif (found := _EXIT_CODE.match(line)) is not None:
            exit_code = int(found[1])
    return None if rank is None or exit_code is None else RootCause(rank, exit_code)


def explained(
    cause: str,
    last_lines: Sequence[str],
    *,
    failed: RankFailed | None,
    error: RankError | None,
    has_oom_kill: bool = False,
) -> str:
    """The best account there is: the rank's own words, its error file, torchrun's report."""
    if failed is not None:
        return f"rank {failed.rank} failed: {failed.message}"
    if error is not None:
        return f"rank {error.local_rank} failed: {error.message}"
    root = root_cause(last_lines)
    if root is None:
        return cause
    if root.exit_code == _KILLED and has_oom_kill:
        return f"rank {root.rank} was killed by the kernel's out-of-memory killer"
    if root.exit_code < 0:
        return f"rank {root.rank} was killed by signal {-root.exit_code}"
    return f"rank {root.rank} exited with code {root.exit_code}"
