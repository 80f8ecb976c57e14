import pytest


@pytest.fixture
def anyio_backend():
    # Real processes need a real loop; uvloop is what the supervisor runs on.
    return "asyncio", {"use_uvloop": True}
