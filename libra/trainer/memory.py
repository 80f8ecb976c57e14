"""How much memory this rank needs: so far, and for one piece of work."""

import resource
from collections.abc import Callable
from pathlib import Path

import torch

from libra.errors import SiteError

KIB = 1024
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def peak_memory_bytes(device: torch.device) -> int:
    """Largest allocation on the device so far; on the CPU, the process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def rise_of(work: Callable[[], None], device: torch.device) -> tuple[int, int]:
    """(bytes held before `work`, bytes held at its fullest moment). Peaks before it are forgotten.

    Raises SiteError on a CPU whose kernel cannot forget a peak, and whatever `work` raises.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return before, torch.cuda.max_memory_allocated(device)
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError as error:
        raise SiteError(
            f"memory_budget_dry_run_enabled measures memory with {_CLEAR}, which does not work "
            f"here ({error.strerror}); switch it off"
        ) from error
    before = _status_bytes("VmRSS")
    work()
    return before, _status_bytes("VmHWM")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch found no memory. Its CPU allocator says so in words only."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * KIB
    raise SiteError(f"{_STATUS} has no {name}")
