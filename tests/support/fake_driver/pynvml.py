"""The driver's library for tests: four devices of 100 GiB whose memory in use stands in a file.

FAKE_NVML names it: JSON, bytes by index; a device that is not in it is idle. Cores 0 to 2 are near
devices 0 and 1, core 1 alone near device 2, all near device 3.
"""

import json
from pathlib import Path
from types import SimpleNamespace

from libra.config.load import current_environ

TOTAL = 100 * 2**30
CORES = [[0b111], [0b111], [0b10], [2**64 - 1]]


class NVMLError(Exception):
    pass


def _used() -> dict[str, int]:
    path = current_environ().get("FAKE_NVML")
    if path is None:
        raise NVMLError("Driver Not Loaded")
    return json.loads(Path(path).read_text())


def nvmlInit() -> None:  # noqa: N802 - the library's names
    _used()


def nvmlShutdown() -> None:  # noqa: N802
    pass


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(CORES)


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:  # noqa: N802
    raise NVMLError(f"Not Found: {uuid}")


def nvmlDeviceGetUUID(handle: int) -> str:  # noqa: N802
    return f"GPU-{handle}{handle}-abc"


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:  # noqa: N802
    return SimpleNamespace(used=_used().get(str(handle), 0), total=TOTAL)


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:  # noqa: N802
    return [SimpleNamespace(pid=4711)] if str(handle) in _used() else []


def nvmlDeviceGetCpuAffinity(handle: int, num_words: int) -> list[int]:  # noqa: N802
    return (CORES[handle] * num_words)[:num_words]
