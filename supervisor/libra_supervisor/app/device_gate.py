"""A start on a GPU waits until the memory that it needs is free there.

What a killed process held on a device comes back some time after its end, or, when something of it
survived, never. A start before that runs out of memory and costs a restart of the budget; waiting
costs nothing. `status` shows what is waited for.
"""

from collections.abc import Callable, Sequence
from typing import Final

import anyio.to_thread

from libra.errors import SiteError
from libra.ids import ChildId
from libra.tracing.log import get_log
from libra_supervisor.doctor.accelerators import DeviceMemory, device_memory

SLACK_BYTES: Final = 2 * 2**30
"""How much less than before its first start a child without a known need makes do with."""

_GIB: Final = 2**30
_log = get_log()


class DeviceGate:
    """Of one child. Its devices must be its alone, else it would wait for its own neighbour."""

    def __init__(
        self,
        child_id: ChildId,
        devices: Sequence[str],
        *,
        needed_fraction: float | None,
        look: Callable[[Sequence[str]], tuple[DeviceMemory, ...]] = device_memory,
    ) -> None:
        """`needed_fraction` of each device has to be free.

        None: as much as was free at most before an earlier start, less SLACK_BYTES; the first start
        waits for nothing then.
        """
        self._child_id = child_id
        self._devices = tuple(devices)
        self._needed_fraction = needed_fraction
        self._look = look
        self._most_free_of: dict[str, int] = {}
        self._is_blind_said = False

    async def hindrance(self) -> str | None:
        """Why a start has to wait; None when it can go ahead, or when the driver does not tell."""
        if not self._devices:
            return None
        try:
            found = await anyio.to_thread.run_sync(self._look, self._devices)
        except SiteError as error:
            if not self._is_blind_said:
                self._is_blind_said = True
                _log.warning("device_memory_unknown", child=self._child_id, why=str(error))
            return None
        busy = [it for it in found if it.total_bytes - it.used_bytes < self._needed_bytes(it)]
        for it in found:
            free_bytes = it.total_bytes - it.used_bytes
            most = self._most_free_of.get(it.device, 0)
            self._most_free_of[it.device] = max(most, free_bytes)
        return "; ".join(map(self._in_words, busy)) or None

    def _needed_bytes(self, found: DeviceMemory) -> int:
        if self._needed_fraction is not None:
            return int(found.total_bytes * self._needed_fraction)
        return self._most_free_of.get(found.device, 0) - SLACK_BYTES

    def _in_words(self, found: DeviceMemory) -> str:
        pids = f" (pid {', '.join(map(str, found.pids))})" if found.pids else ""
        return (
            f"waiting for GPU {found.device}: {found.used_bytes / _GIB:.1f} of "
            f"{found.total_bytes / _GIB:.1f} GiB are in use{pids}, "
            f"{self._needed_bytes(found) / _GIB:.1f} GiB have to be free"
        )
