"""What goes out on one connection, in which order, and what is said once for many."""

from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from libra.wire.node import Envelope
from libra_supervisor.nodes.outgoing import Outgoing

BARE = Envelope(7, 7)
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "trio"


class Sent:
    def __init__(self):
        self.messages = []

    async def send(self, message):
        self.messages.append(msgspec.msgpack.decode(message, type=Envelope))


@asynccontextmanager
async def outgoing():
    sent = Sent()
    one = Outgoing(sent, lambda: BARE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.run)
        yield one, sent.messages
        tasks.cancel_scope.cancel()


def numbered(number):
    return Envelope(0, 0, number, b"x")


async def test_who_is_owed_no_acknowledgement_gets_none():
    async with outgoing() as (one, sent):
        one.add(numbered(1), numbered(2))
        one.add(numbered(3))
        await anyio.wait_all_tasks_blocked()
        assert sent == [numbered(1), numbered(2), numbered(3)]


async def test_many_messages_are_acknowledged_by_one_and_once():
    async with outgoing() as (one, sent):
        for _ in range(5):
            one.owe()
        await anyio.wait_all_tasks_blocked()
        assert sent == [BARE]
        one.add(numbered(1))
        await anyio.wait_all_tasks_blocked()
        assert sent == [BARE, numbered(1)]
        one.owe()
        one.add(numbered(2))
        await anyio.wait_all_tasks_blocked()
        assert sent == [BARE, numbered(1), numbered(2), BARE]
