"""Versions on the disk that nodes share: what a node has to read when it is back is still there."""

from random import Random

import pytest

from libra.ids import NodeRank
from libra.weights.retention import deletable_versions
from libra_supervisor.loop import commands
from node_world import PATIENCE_S, NodeWorld

ONE = NodeRank(1)


class DiskWorld(NodeWorld):
    """Keeps the newest version alone, and what it is told to."""

    def __init__(self, **options):
        self.on_disk, self.num_deleted = set(), 0
        super().__init__(**options)

    def _carry_out(self, command):
        match command:
            case commands.PrepareExport(_, version):
                self.on_disk.add(version)
            case commands.RetireVersions(pinned):
                gone = deletable_versions(self.on_disk, keep_last=1, pinned=pinned, in_use=())
                self.on_disk -= set(gone)
                self.num_deleted += len(gone)
            case commands.SendReload(instance_id, _, request):
                version = request.policy_version
                assert version in self.on_disk, f"{instance_id} is to load v{version}, long gone"
        super()._carry_out(command)


@pytest.mark.case("R-B82")
def test_a_server_whose_node_is_back_finds_the_version_that_the_run_went_back_to():
    world, rng = DiskWorld(total_steps=14), Random(1)
    world.boot()
    world.until(rng, lambda: len(world.trained) > 1)
    # No newer checkpoint from here on: the loss of the ranks takes versions that were published.
    world.is_disk_stuck = True
    while world.step(rng):
        pass
    newest = max(world.on_disk)
    world.lose(ONE)
    world.is_disk_stuck = False
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: world.control.publication.committed is not None)
    assert world.control.publication.committed < newest
    world.join(ONE)
    world.pass_time(PATIENCE_S)
    world.until(rng, lambda: "vllm-2" in world.servers)
    world.run(rng)
    assert world.ended.exit_code == 0
    assert world.num_deleted
