"""A network for links in one process: delays, cuts, and silence that nobody is told of."""

from contextlib import asynccontextmanager

import anyio

from libra import clock
from libra.errors import PeerError, ungrouped


class FakeEnd:
    """One end of a connection."""

    def __init__(self, net, incoming, outgoing):
        self.net, self._in, self._out = net, incoming, outgoing

    async def send(self, message):
        self.net.num_messages += 1
        if self.net.is_silent:
            return
        try:
            self._out.send_nowait((clock.now() + self.net.delay_s, message))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise PeerError("the connection was reset") from None

    async def receive(self):
        try:
            due_at, message = await self._in.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            return None
        await clock.sleep_until(due_at)
        # Bytes that are under way when a link goes silent never arrive.
        return await self.receive() if self.net.is_silent else message

    def close(self):
        self._in.close()
        self._out.close()


class FakeNet:
    """The way from one follower to whoever leads."""

    def __init__(self, *, delay_s=0.01):
        self.delay_s = delay_s
        self.is_down = self.is_silent = False
        self.serve = None
        """The leader's; None: nobody listens."""

        self._open = []
        self.num_dials = self.num_messages = 0

    @asynccontextmanager
    async def dial(self):
        self.num_dials += 1
        if self.is_silent:
            await clock.sleep(5.0)
            raise PeerError("timed out")
        if self.is_down or self.serve is None:
            raise PeerError("connection refused")
        up_send, up_receive = anyio.create_memory_object_stream(100_000)
        down_send, down_receive = anyio.create_memory_object_stream(100_000)
        ours, theirs = (
            FakeEnd(self, down_receive, up_send),
            FakeEnd(self, up_receive, down_send),
        )
        self._open.append((ours, theirs))
        try:
            with ungrouped():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._served, theirs, self.serve)
                    try:
                        yield ours
                    finally:
                        tasks.cancel_scope.cancel()
        finally:
            ours.close()
            theirs.close()
            self._open.remove((ours, theirs))

    async def _served(self, theirs, serve):
        await serve(theirs)
        theirs.close()

    def cut(self):
        """Both ends see the connection end; nobody can dial until it is mended."""
        self.is_down = True
        for ours, theirs in self._open:
            ours.close()
            theirs.close()

    def mend(self):
        self.is_down = self.is_silent = False
