import pytest

from libra.ids import Incarnation
from libra_supervisor.process.cgroup import delegated_root
from processes import site

pytestmark = [pytest.mark.anyio, pytest.mark.system]


async def test_an_adopted_child_brings_its_cgroup(tmp_path):
    root = delegated_root()
    assert root is not None, "run the system tests where cgroup v2 groups can be made (as root)"
    async with site(tmp_path, cgroups=root) as place:
        child = await place.spawn("sleep", "60")
        found = root.of_process(child.identity.pid)
        assert found is not None
        assert found.pids() == (child.identity.pid,)
        adopted = await place.spawner.adopt(child.child_id, child.identity, Incarnation("x"))
        assert adopted.tree._cgroup == found
        adopted.reap()
        child.reap()
