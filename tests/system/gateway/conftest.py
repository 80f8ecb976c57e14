import anyio
import pytest

from real_servers import RealServer, RunFiles

TIGHT_BLOCKS = 10
"""KV blocks of the tight server; vLLM keeps one, so 288 tokens in blocks of 32."""


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    return RunFiles(tmp_path_factory.mktemp("gateway"))


@pytest.fixture(scope="session")
async def servers(files, anyio_backend):
    """`i0` with room to spare and `i1` whose KV cache holds one or two samples."""
    blocks = ("--block-size", "32", "--num-gpu-blocks-override", str(TIGHT_BLOCKS))
    tight = (*blocks, "--max-model-len", "256")  # a longest request must fit
    wide = RealServer(files, "i0", core=0)
    narrow = RealServer(files, "i1", core=1, extra_args=tight)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wide.until_ready)
            tasks.start_soon(narrow.until_ready)
        yield wide, narrow
    finally:
        wide.kill()
        narrow.kill()


@pytest.fixture(scope="session")
def tokenizer(files):
    """Where the model that the servers serve lies, its tokenizer with it."""
    return files.base
