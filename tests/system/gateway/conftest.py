import pytest

from real_servers import RunFiles
from tail import unequal_servers


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    return RunFiles(tmp_path_factory.mktemp("gateway"))


@pytest.fixture(scope="session")
async def servers(files, anyio_backend):
    async with unequal_servers(files) as both:
        yield both


@pytest.fixture(scope="session")
def tokenizer(files):
    """Where the model that the servers serve lies, its tokenizer with it."""
    return files.base
