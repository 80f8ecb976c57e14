"""How much memory this rank has needed so far."""

import resource

import torch

KIB = 1024


def peak_memory_bytes(device: torch.device) -> int:
    """Largest allocation on the device so far; on the CPU, the process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
