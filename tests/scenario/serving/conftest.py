import contextlib

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import trio.testing

from guarded_app import GuardedApp


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0.001)}


async def run_here(function, *arguments, **_limits):
    await anyio.lowlevel.checkpoint()
    return function(*arguments)


@pytest.fixture
def app(tmp_path, monkeypatch):
    # Virtual time would run on, by more or less, while a thread reads files.
    monkeypatch.setattr(anyio.to_thread, "run_sync", run_here)
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
