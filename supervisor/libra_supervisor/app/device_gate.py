"""A start on a GPU waits until the memory that it needs is free there.

What a killed process held on a device comes back some time after its end, or, when something of it
survived, never. A start before that runs out of memory and costs a restart of the budget; waiting
costs nothing. `status` shows what is waited for.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

import anyio.to_thread

from libra.errors import PeerError, SiteError
from libra.ids import ChildId
from libra.tracing.log import get_log
from libra.wire.node import DeviceMemory
from libra_supervisor.doctor.accelerators import device_memory
from libra_supervisor.nodes.remote import RemoteNode
from libra_supervisor.ranks.gang import Hindrance

SLACK_BYTES: Final = 2 * 2**30
"""How much less than before its first start a child without a known need makes do with."""

_GIB: Final = 2**30
_log = get_log()


Look = Callable[[], Awaitable[tuple[DeviceMemory, ...]]]
"""Raises SiteError when the driver does not tell."""


def look_here(devices: Sequence[str]) -> Look:
    """At devices of this machine."""

    async def look() -> tuple[DeviceMemory, ...]:
        return await anyio.to_thread.run_sync(device_memory, devices) if devices else ()

    return look


class DeviceGate:
    """Of one child. Its devices must be its alone, else it would wait for its own neighbour."""

    def __init__(
        self,
        child_id: ChildId,
        look: Look,
        *,
        needed_fraction: float | None,
        where: str = "",
    ) -> None:
        """`needed_fraction` of each device has to be free; `where` says whose they are.

        None: as much as was free at most before an earlier start, less SLACK_BYTES; the first start
        waits for nothing then.
        """
        self._child_id = child_id
        self._needed_fraction = needed_fraction
        self._look = look
        self._where = where
        self._most_free_of: dict[str, int] = {}
        self._kept_of: dict[str, int] = {}
        self._is_blind_said = False

    async def hindrance(self) -> str | None:
        """Why a start has to wait; None when it can go ahead, or when the driver does not tell."""
        try:
            found = await self._look()
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

    async def note_kept(self) -> None:
        """What is in use now is the child's own, which it keeps while others have the devices."""
        with suppress(SiteError):
            self._kept_of = {it.device: it.used_bytes for it in await self._look()}

    def forget_kept(self) -> None:
        """The process that kept something is to be replaced."""
        self._kept_of = {}

    def _needed_bytes(self, found: DeviceMemory) -> int:
        if self._needed_fraction is not None:
            needed_bytes = int(found.total_bytes * self._needed_fraction)
            return needed_bytes - self._kept_of.get(found.device, 0)
        return self._most_free_of.get(found.device, 0) - SLACK_BYTES

    def _in_words(self, found: DeviceMemory) -> str:
        pids = f" (pid {', '.join(map(str, found.pids))})" if found.pids else ""
        return (
            f"waiting for GPU {found.device}{self._where}: {found.used_bytes / _GIB:.1f} of "
            f"{found.total_bytes / _GIB:.1f} GiB are in use{pids}, "
            f"{self._needed_bytes(found) / _GIB:.1f} GiB have to be free"
        )


class NodeGate:
    """A start on another node: the node has to be there, and then its devices free."""

    def __init__(self, node: RemoteNode, gate: DeviceGate | None) -> None:
        """`gate` looks at the node's devices; None: there are none to look at."""
        self._node = node
        self._gate = gate

    async def hindrance(self) -> str | None:
        """Why a start there has to wait."""
        reason = await self._node.hindrance()
        if reason is not None or self._gate is None:
            return reason
        try:
            return await self._gate.hindrance()
        except PeerError:
            # Lost meanwhile, or without such devices: then the start itself says so.
            return await self._node.hindrance()

    async def note_kept(self) -> None:
        if self._gate is not None:
            with suppress(PeerError):  # the node is lost, and what was kept with it
                await self._gate.note_kept()

    def forget_kept(self) -> None:
        if self._gate is not None:
            self._gate.forget_kept()


def all_of(first: Hindrance, gates: Sequence[DeviceGate | NodeGate]) -> Hindrance:
    """What `first` says, else what all gates say together."""

    async def hindrance() -> str | None:
        if (reason := await first()) is not None:
            return reason
        found = [await gate.hindrance() for gate in gates]
        return "; ".join(it for it in found if it is not None) or None

    return hindrance
