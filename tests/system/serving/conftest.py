import anyio
import pytest

from real_servers import RealServer, RunFiles


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    return RunFiles(tmp_path_factory.mktemp("serving"))


@pytest.fixture(scope="session")
def versions(files):
    """Published v1 to v3, as (directory, manifest hash)."""
    return {version: files.publish(version) for version in (1, 2, 3)}


@pytest.fixture(scope="session")
async def servers(files, versions, anyio_backend):
    """Two servers: `a` on the base model, `b` started on v1. Both must end cleanly by SIGTERM."""
    a = RealServer(files, "vllm-a", core=0)
    b = RealServer(files, "vllm-b", core=1, served=versions[1][0])
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a.until_ready)
            tasks.start_soon(b.until_ready)
        yield a, b
        for server in (a, b):
            assert server.terminate() == 0, server.last_lines()
            await server.until_gone()
    finally:
        for server in (a, b):
            server.kill()


@pytest.fixture
async def a(servers):
    async with servers[0].client() as client:
        yield client


@pytest.fixture
async def b(servers):
    async with servers[1].client() as client:
        yield client


@pytest.fixture
def urls(servers):
    return servers[0].url, servers[1].url
