"""Signs of life of single requests, whose answers come whole: the server is asked for them.

A server that hangs is found by `libra_supervisor.instances.health`. What that cannot see is one
request that got lost in a server which goes on with the others.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Never, Protocol

import anyio

from libra import clock
from libra.errors import LibraError, PeerError, RejectedError
from libra.ids import RequestId

PERIOD_S = 30.0
"""A tenth of the silence after which a request is given up."""

SILENCE_S = 300.0
"""For requests of others; our own have
`libra_supervisor.rollouts.client.GenerationSettings.idle_timeout_s`."""

Heard = Callable[[int], None]
"""Called with the number of answer tokens so far."""


class WatchedClient(Protocol):
    """The part of InstanceClient that is asked."""

    async def open_requests(self) -> dict[str, int]: ...


class RequestWatch:
    """Who listens for which request of one instance; outlives its processes."""

    def __init__(self, *, rng: Random) -> None:
        self._rng = rng
        self._heard_of: defaultdict[RequestId, list[Heard]] = defaultdict(list)

    @contextmanager
    def hearing(self, request_id: RequestId, heard: Heard) -> Iterator[None]:
        """Within the block `heard` is told whenever the server says that it has the request.

        Clients of the gateway choose names, so several requests may have one.
        """
        self._heard_of[request_id].append(heard)
        try:
            yield
        finally:
            self._heard_of[request_id].remove(heard)
            if not self._heard_of[request_id]:
                del self._heard_of[request_id]

    @contextmanager
    def patience(self, request_id: RequestId, *, silence_s: float = SILENCE_S) -> Iterator[None]:
        """End the block with a PeerError after `silence_s` without a sign of the request."""
        with anyio.CancelScope(deadline=clock.now() + silence_s) as scope:

            def heard(_num_tokens: int) -> None:
                scope.deadline = clock.now() + silence_s

            with self.hearing(request_id, heard):
                yield
        if scope.cancelled_caught:
            raise PeerError(f"{request_id} was lost: no sign of it for {silence_s} s")

    async def run(self, client: WatchedClient) -> Never:
        """Ask at least once in PERIOD_S while anybody listens; no answer is no sign of life."""
        while True:
            await clock.sleep(PERIOD_S * self._rng.uniform(0.5, 1.0))
            if self._heard_of:
                await self._ask(client)

    async def _ask(self, client: WatchedClient) -> None:
        try:
            told: Mapping[str, int] = await client.open_requests()
        except RejectedError:
            # It lives and cannot tell, as a server without our middleware could not.
            told = {str(name): 0 for name in self._heard_of}
        except LibraError:
            return
        for request_id, listeners in tuple(self._heard_of.items()):
            num_tokens = told.get(request_id)
            if num_tokens is not None:
                for heard in listeners:
                    heard(num_tokens)
