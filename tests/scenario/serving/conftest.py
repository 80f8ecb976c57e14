import contextlib

import anyio.lowlevel
import pytest
import trio.testing

from guarded_app import GuardedApp


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0.001)}


async def at_once(work, *arguments, **_how):
    await anyio.lowlevel.checkpoint()
    return work(*arguments)


@pytest.fixture
def app(tmp_path, monkeypatch):
    # While a thread works the virtual clock would run on, by as much as the thread is slow.
    monkeypatch.setattr("anyio.to_thread.run_sync", at_once)
    return GuardedApp(tmp_path, monkeypatch)


@pytest.fixture
def running(app):
    """Returns an asynchronous context in which the fake engine steps."""

    @contextlib.asynccontextmanager
    async def run():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app.engine.run)
            yield tasks
            tasks.cancel_scope.cancel()

    return run
