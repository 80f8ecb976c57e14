"""Which policy version produced which output tokens.

Time is cut into epochs, one for each load. When an epoch ends, the engine is paused and tells for
each request in it how many tokens it has produced; those counts stay with the epoch. A request
remembers the epoch in which it was handed to the engine, so its spans follow from the chain of
epochs from there on. Nothing is handed over while the engine is paused (`libra.serving.gate`), so
a request that an epoch's counts do not name had finished before that epoch ended.

An epoch is proven by the probe after its load. Tokens of an epoch that is not are not answered.
"""

from collections.abc import Iterator, Mapping

import anyio

from libra.ids import PolicyVersion
from libra.wire.instance import VersionSpan


class Epoch:
    """From one load to the next. It is freed with the last request that began in it."""

    def __init__(self, version: PolicyVersion, *, is_proven: bool) -> None:
        self.version = version
        self.num_tokens_at_end: Mapping[str, int] = {}
        self.next: Epoch | None = None
        self._is_proven = is_proven
        self._judged = anyio.Event()
        if is_proven:
            self._judged.set()

    def judge(self, *, is_proven: bool) -> None:
        self._is_proven = is_proven
        self._judged.set()

    def fail_if_unproven(self) -> None:
        if not self._judged.is_set():
            self.judge(is_proven=False)

    async def wait_until_judged(self) -> bool:
        """Whether its tokens may be answered."""
        await self._judged.wait()
        return self._is_proven


class VersionLedger:
    """The chain of epochs of one server; it lives as long as the process."""

    def __init__(self, version: PolicyVersion) -> None:
        self.current = Epoch(version, is_proven=True)
        self._is_known = True

    @property
    def version(self) -> PolicyVersion | None:
        """What a request handed over now is answered with; None when nobody knows."""
        return self.current.version if self._is_known else None

    def begin(self, version: PolicyVersion, num_tokens_of: Mapping[str, int]) -> None:
        """Begin an unproven epoch; `num_tokens_of` are the counts of the paused requests."""
        epoch = Epoch(version, is_proven=False)
        self.current.num_tokens_at_end = num_tokens_of
        self.current.next = epoch
        self.current = epoch
        self._is_known = False

    def prove(self) -> None:
        self.current.judge(is_proven=True)
        self._is_known = True

    def lose(self) -> None:
        """From now on the weights may be anything; tokens of a proven epoch remain good."""
        self._is_known = False
        self.current.fail_if_unproven()

    def void(self) -> None:
        """Somebody may have changed the weights under running requests: answer none of them."""
        self._is_known = False
        self.current.judge(is_proven=False)


def spans_of(
    first: Epoch, engine_request_id: str, num_tokens: int
) -> Iterator[tuple[Epoch, VersionSpan]]:
    """Yield the spans of a finished request's tokens [0, num_tokens), each with its epoch."""
    epoch, start = first, 0
    while epoch.next is not None and engine_request_id in epoch.num_tokens_at_end:
        # A stop string may take back tokens that were counted.
        end = min(epoch.num_tokens_at_end[engine_request_id], num_tokens)
        if end > start:
            yield epoch, VersionSpan(epoch.version, start, end)
            start = end
        epoch = epoch.next
    if num_tokens > start:
        yield epoch, VersionSpan(epoch.version, start, num_tokens)
