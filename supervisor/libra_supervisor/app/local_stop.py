"""Who stops a follower: its leader is asked to end the run; without one the node leaves alone."""

import signal
from collections.abc import AsyncIterable, Callable
from typing import Final

from libra import clock
from libra.ids import NodeRank
from libra.tracing.log import get_log
from libra.wire.node import NodeEvent, StopAsked
from libra_supervisor.app.stop_signals import exit_code_of
from libra_supervisor.nodes.allegiance import Allegiance
from libra_supervisor.nodes.lease import Standing

_PATIENT_STOPS: Final = 2
"""The leader is asked for an orderly end, then for a quick one; a third signal waits for nobody."""

_LOOK_PERIOD_S: Final = 0.1
_NO_LEADER: Final = "no leader to end the run with"

_log = get_log()


class LocalStop:
    """What signals have asked of this node, until it is carried out.

    Every leader that takes this node in is told; nobody is waited for beyond the lease.
    """

    def __init__(self, node: NodeRank, *, leave: Callable[[int, str], None]) -> None:
        self._node = node
        self._leave = leave
        self._side: Allegiance | None = None
        self._say: Callable[[NodeEvent], None] | None = None
        self._num_signals = 0
        self._first = signal.SIGTERM
        self._asked: StopAsked | None = None
        self._waits_until = 0.0
        """The end of the newest lease that was held since."""

    def ask_through(self, side: Allegiance, say: Callable[[NodeEvent], None]) -> None:
        """From here on there may be a leader; before it a signal ends the process."""
        self._side, self._say = side, say

    async def hear(self, signals: AsyncIterable[signal.Signals]) -> None:
        async for number in signals:
            self.on_signal(signal.Signals(number))

    def on_signal(self, number: signal.Signals) -> None:
        self._num_signals += 1
        _log.info("signal_received", signal=number.name, count=self._num_signals)
        if self._num_signals == 1:
            self._first = number
        if not self._is_held():
            self._leave_alone(_NO_LEADER)
            return
        if self._num_signals > _PATIENT_STOPS:
            self._leave_alone(f"{self._num_signals} signals: this node leaves without its leader")
            return
        self._asked = StopAsked(
            f"{number.name} on node {self._node}",
            in_hurry=self._num_signals > 1,
            exit_code=exit_code_of(number),
        )
        self.repeat()

    def repeat(self) -> None:
        """Tell the leader of a session that begins; the one before may have heard of nothing."""
        if self._asked is not None and self._say is not None:
            self._say(self._asked)

    async def watch(self) -> None:
        """Leave when nobody renews the lease any more, until cancelled."""
        while True:
            await clock.sleep(_LOOK_PERIOD_S)
            if self._asked is not None and not self._is_held() and clock.now() >= self._waits_until:
                self._leave_alone(_NO_LEADER)

    def _is_held(self) -> bool:
        """Whether there is a lease; notes its end."""
        if self._side is None or self._side.standing(now=clock.now()) is not Standing.HELD:
            return False
        self._waits_until = self._side.lease.until
        return True

    def _leave_alone(self, why: str) -> None:
        self._leave(exit_code_of(self._first), f"{self._first.name}, and {why}")
