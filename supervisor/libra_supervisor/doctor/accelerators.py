"""What the NVIDIA driver says of devices: memory in use, whose it is, and the cores beside them.

A device is an index or a UUID as CUDA_VISIBLE_DEVICES takes it. Calls block for up to a second:
run them in a thread. The driver's library is reached through `pynvml` of the extra `gpu`.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from libra.errors import SiteError
from libra.wire.node import DeviceMemory

_CORES_PER_WORD: Final = 64


def device_memory(devices: Sequence[str]) -> tuple[DeviceMemory, ...]:
    """Memory of each device, in order. Raises SiteError when the driver does not say."""
    with _driver() as nvml:
        return tuple(_memory(nvml, device) for device in devices)


def nearby_cores(device: str) -> tuple[int, ...]:
    """Cores of the device's NUMA node that this process may use; empty when that is all of them.

    Raises SiteError when the driver does not say.
    """
    with _driver() as nvml:
        num_words = -(-(os.cpu_count() or 1) // _CORES_PER_WORD)
        words = nvml.nvmlDeviceGetCpuAffinity(_handle(nvml, device), num_words)
    allowed = os.sched_getaffinity(0)
    near = {
        place * _CORES_PER_WORD + bit
        for place, word in enumerate(words)
        for bit in range(_CORES_PER_WORD)
        if word >> bit & 1
    } & allowed
    return () if near == allowed else tuple(sorted(near))


@contextmanager
def _driver() -> Iterator[Any]:
    try:
        import pynvml  # noqa: PLC0415 - only machines with a GPU have it
    except ImportError:
        raise SiteError(
            "the driver cannot be asked about devices: install nvidia-ml-py (extra gpu)"
        ) from None
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise SiteError(f"the driver does not say how its devices are: {error}") from error


def _handle(nvml: Any, device: str) -> Any:
    if device.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(device))
    handles = (nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount()))
    for handle in handles:
        # CUDA takes any beginning of a UUID that is nobody else's.
        if nvml.nvmlDeviceGetUUID(handle).startswith(device):
            return handle
    # An instance of a partitioned device (MIG) is not among those counted.
    return nvml.nvmlDeviceGetHandleByUUID(device)


def _memory(nvml: Any, device: str) -> DeviceMemory:
    handle = _handle(nvml, device)
    found = nvml.nvmlDeviceGetMemoryInfo(handle)
    holders = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return DeviceMemory(
        device=device,
        used_bytes=int(found.used),
        total_bytes=int(found.total),
        pids=tuple(sorted(it.pid for it in holders)),
    )
