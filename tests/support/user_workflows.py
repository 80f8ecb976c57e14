"""What a user writes: tools and a workflow, found by `module:function`."""

from libra import clock


async def slow(text: str) -> str:
    """Echo after a while."""
    await clock.sleep(5)
    return f"slow {text}"


def add(a: int, b: int = 1) -> int:
    return a + b


def broken():
    raise RuntimeError("no such page")


async def endless():
    await clock.sleep(10**6)


async def workflow(task, client, *, times):
    return (task, times)
