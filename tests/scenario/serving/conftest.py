import contextlib

import anyio
import pytest
import trio.testing

from guarded_app import GuardedApp


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0.001)}


@pytest.fixture
def app(tmp_path, monkeypatch):
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
