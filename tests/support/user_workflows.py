"""What a user writes: tools and a workflow, found by `module:function`."""

import asyncio

from libra import clock


async def slow(text: str) -> str:
    """Echo after a while."""
    await clock.sleep(5)
    return f"slow {text}"


def add(a: int, b: int = 1) -> int:
    return a + b


def broken():
    raise RuntimeError("no such page")


def unknown_type(place: "Nowhere"):  # noqa: F821 - on purpose
    return place


def scrapes():
    return "half \ud800"


def leaves():
    raise SystemExit(3)


async def leaves_async():
    raise SystemExit(4)


async def waits_in_vain():
    answer = asyncio.get_running_loop().create_future()
    answer.cancel()
    await answer


async def endless():
    await clock.sleep(10**6)


async def workflow(task, client, *, times):
    return (task, times)
