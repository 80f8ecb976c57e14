"""Signs of life of single requests, whose answers come whole: the server is asked for them.

A server that hangs is found by `libra_supervisor.instances.health`. What that cannot see is one
request that got lost in a server which goes on with the others.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Never, Protocol

from libra import clock
from libra.errors import LibraError, RejectedError
from libra.ids import RequestId

PERIOD_S = 30.0
"""A tenth of the silence after which a request is given up
(`libra_supervisor.rollouts.client.GenerationSettings.idle_timeout_s`)."""

Heard = Callable[[int], None]
"""Called with the number of answer tokens so far."""


class WatchedClient(Protocol):
    """The part of InstanceClient that is asked."""

    async def open_requests(self) -> dict[str, int]: ...


class RequestWatch:
    """Who listens for which request of one instance; outlives its processes."""

    def __init__(self, *, rng: Random) -> None:
        self._rng = rng
        self._heard_of: dict[RequestId, Heard] = {}

    @contextmanager
    def hearing(self, request_id: RequestId, heard: Heard) -> Iterator[None]:
        """Within the block `heard` is told whenever the server says that it has the request."""
        self._heard_of[request_id] = heard
        try:
            yield
        finally:
            del self._heard_of[request_id]

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
        for request_id, heard in tuple(self._heard_of.items()):
            num_tokens = told.get(request_id)
            if num_tokens is not None:
                heard(num_tokens)
