"""One server that gives its devices' memory back for a while, and takes it again."""

from collections.abc import Awaitable
from typing import Final, Protocol

from libra import clock
from libra.ids import InstanceId
from libra.tracing.log import get_log
from libra_supervisor.instances.client import InstanceClient

_LOOK_S: Final = 0.5

_log = get_log()


class MemoryGate(Protocol):
    """Says when the server's devices have the memory that it needs."""

    def hindrance(self) -> Awaitable[str | None]:
        """Why it has to wait; None when it can go ahead."""

    def note_kept(self) -> Awaitable[None]:
        """What is in use on its devices now does not count as missing for the next start."""

    def forget_kept(self) -> None:
        """Everything counts again."""


class Slumber:
    """From the order to sleep until the server is awake again, or is to be replaced."""

    def __init__(
        self, instance_id: InstanceId, gate: MemoryGate | None, *, timeout_s: float
    ) -> None:
        """`timeout_s` limits each call to the server."""
        self._instance_id = instance_id
        self._gate = gate
        self._timeout_s = timeout_s
        self.is_on = False
        """While it is, the process owes nothing but its health, and none comes in its place."""

    async def begin(self, client: InstanceClient) -> None:
        """Have the process give its memory back.

        Raises LibraError when it does not; then it is of no use any more.
        """
        self.is_on = True
        await client.sleep(timeout_s=self._timeout_s)
        if self._gate is not None:
            await self._gate.note_kept()

    async def end(self, client: InstanceClient) -> None:
        """Have it take the memory again, once it is free. Raises as `begin`.

        Whatever comes of it, the next process is a server like any other.
        """
        try:
            await self._until_free()
            await client.wake_up(timeout_s=self._timeout_s)
        finally:
            self.is_on = False
            if self._gate is not None:
                self._gate.forget_kept()

    async def _until_free(self) -> None:
        said: str | None = None
        while self._gate is not None and (why := await self._gate.hindrance()) is not None:
            if why != said:
                said = why
                _log.info("wake_waits", instance=self._instance_id, why=why)
            await clock.sleep(_LOOK_S)
