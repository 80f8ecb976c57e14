"""Which accelerators and cores this process may use. Looks, and imports nothing heavy."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from libra.errors import SiteError
from libra.tracing.log import get_log
from libra_supervisor.doctor.accelerators import nearby_cores

NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")

_log = get_log()


def cuda_devices(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Devices in slot order: those of CUDA_VISIBLE_DEVICES, else all that the driver lists."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    try:
        num_devices = len(list(NVIDIA_DEVICES.iterdir()))
    except OSError:
        return ()
    return tuple(str(index) for index in range(num_devices))


def cpu_cores() -> tuple[str, ...]:
    """Cores that the scheduler lets this process run on."""
    return tuple(str(core) for core in sorted(os.sched_getaffinity(0)))


def resolved_device(
    wanted: Literal["auto", "cpu", "cuda"], environ: Mapping[str, str]
) -> Literal["cpu", "cuda"]:
    """`auto` is cuda where a device can be used. Raises SiteError for cuda without devices."""
    if wanted == "cpu":
        return "cpu"
    if cuda_devices(environ):
        return "cuda"
    if wanted == "cuda":
        raise SiteError(
            "device: cuda is asked for, but no NVIDIA device is visible "
            "(CUDA_VISIBLE_DEVICES, /proc/driver/nvidia/gpus); use device: cpu or auto"
        )
    return "cpu"


def num_slots_here(device: Literal["cpu", "cuda"], environ: Mapping[str, str]) -> int:
    """Slots that this machine has for one run: visible CUDA devices, or cores."""
    return len(cuda_devices(environ) if device == "cuda" else cpu_cores())


def slot_devices(
    device: Literal["cpu", "cuda"], *, num_slots: int, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """What each slot of the plan is bound to; on CPU slots share cores, round robin.

    Raises SiteError when the plan needs more CUDA devices than there are.
    """
    if device == "cpu":
        cores = cpu_cores()
        return tuple(cores[slot % len(cores)] for slot in range(num_slots))
    devices = cuda_devices(environ)
    if len(devices) < num_slots:
        raise SiteError(
            f"the plan uses {num_slots} GPUs and {len(devices)} are visible "
            f"({', '.join(devices) or 'none'}); lower train_gpus or rollout_gpus"
        )
    return devices[:num_slots]


def slot_cores(
    device: Literal["cpu", "cuda"], devices: tuple[str, ...]
) -> tuple[tuple[int, ...], ...]:
    """By slot: cores on the NUMA node of its CUDA device; none where all are, or none is known.

    On CPU vLLM binds its workers itself, to the core it is told, and nothing else is bound.
    """
    if device == "cpu":
        return ()
    try:
        return tuple(map(nearby_cores, devices))
    except SiteError as error:
        _log.warning("cores_not_bound", why=str(error))
        return ()
