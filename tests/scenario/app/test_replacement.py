from pathlib import Path
from random import Random
from types import SimpleNamespace

import anyio
import pytest

from libra.config.supervision import SupervisionConfig
from libra.errors import PeerError
from libra.ids import InstanceId, SlotId
from libra.planner.plan import InstancePlacement
from libra_supervisor.app.engine import Engine

pytestmark = pytest.mark.anyio

OLD, NEW, COMMITTED = Path("v000003"), Path("v000004"), Path("v000002")


@pytest.fixture
def engine():
    placement = InstancePlacement(instance_id=InstanceId("vllm-0"), tp=1, slots=(SlotId(0),))
    site = SimpleNamespace(config=SimpleNamespace(supervision=SupervisionConfig()))
    return Engine(site, placement, None, port=0, served_directory=lambda: COMMITTED, rng=Random(0))


async def test_the_newest_request_decides_from_what_the_next_process_starts(engine):
    refused = []

    async def ask_for_the_old_version():
        with pytest.raises(PeerError, match="newer weights") as caught:
            await engine.replaced(OLD)
        refused.append(caught.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask_for_the_old_version)
        await anyio.wait_all_tasks_blocked()
        assert engine._next_directory() == OLD
        tasks.start_soon(engine.replaced, NEW)
        await anyio.wait_all_tasks_blocked()
        assert len(refused) == 1
        # The end of the request before has not taken the newest one's place away.
        assert engine._next_directory() == NEW
        tasks.cancel_scope.cancel()


async def test_a_request_given_up_leaves_the_committed_version(engine):
    with anyio.move_on_after(0):
        await engine.replaced(NEW)
    assert engine._next_directory() == COMMITTED
