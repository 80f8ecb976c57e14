"""What a follower says of its jobs, whatever its leader orders in between."""

from pathlib import Path
from random import Random

import msgspec
import pytest

from libra.rollouts.trajectory import SampleFailed
from libra.wire import node_rollouts as wire
from libra_supervisor.app import node_making
from libra_supervisor.app.node_making import MakingSite, Part, PromptShelf
from libra_supervisor.events import SampleFinished, SampleGaveUp
from libra_supervisor.run_directory import RunDirectory
from made_there import OwnRunner
from trajectories import admitted, trajectory

GROUP = admitted(1, n_samples=1)
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "trio"


class Runner(OwnRunner):
    """Has each group once at a time, as the real one."""

    def __init__(self):
        super().__init__()
        self.running = set()

    def start(self, group, samples):
        assert group.group_id not in self.running, "started twice"
        self.running.add(group.group_id)
        super().start(group, samples)

    def cancel(self, group_id):
        self.running.discard(group_id)
        super().cancel(group_id)


class Taken:
    """A part that is ready; `while_room` is called where a piece waits for room on the link."""

    def __init__(self):
        self.said, self.runner = [], Runner()
        self.while_room = lambda: None
        directory = RunDirectory(Path("/r"))
        site = MakingSite(
            node=1, run_id="r", directory=directory, own=directory, environ={}, spawner=None,
            say=self.said.append, say_when_room=self.say_when_room, rng=Random(1),
        )  # fmt: skip
        servers = wire.Servers(revision=0, wanted=None, changed=())
        order = wire.TakePart(token_file="/t", kv_capacity_by_tp={}, servers=servers)
        self.part = Part(site, order, PromptShelf())
        self.part._runners = {False: self.runner, True: Runner()}

    async def say_when_room(self, piece):
        self.said.append(piece)
        self.while_room()

    def make(self, job):
        prompt = GROUP.prompt
        self.part.obey(
            wire.MakeSamples(
                job=job, prompt_id=prompt.prompt_id, row=prompt.row, epoch=prompt.epoch,
                attempt=0, n_samples=1, samples=(0,),
            )
        )  # fmt: skip

    async def finish(self):
        await self.part._post(SampleFinished(trajectory(GROUP, 0)))

    def pieces(self):
        return [it for it in self.said if isinstance(it, wire.TrajectoryPiece)]


async def test_a_group_that_is_given_again_begins_though_the_one_before_has_not_wound_down():
    taken = Taken()
    taken.make(1)
    await taken.finish()
    taken.make(2)
    assert taken.runner.running == {GROUP.group_id}
    await taken.finish()
    assert [it.job for it in taken.pieces()] == [1, 2]


async def test_the_last_word_of_a_job_ends_none_that_came_after_it():
    taken = Taken()
    taken.make(1)

    def given_again():
        taken.while_room = lambda: None
        taken.part.obey(wire.DropJob(1))
        taken.make(2)

    taken.while_room = given_again
    await taken.finish()
    failure = SampleFailed("timeout", "an engine is silent")
    await taken.part._post(SampleGaveUp(GROUP.group_id, 0, failure))
    assert taken.said[-1] == wire.SampleGone(2, 0, failure.kind, failure.message)


async def test_a_part_that_is_let_go_of_while_it_sends_says_no_further_piece(monkeypatch):
    monkeypatch.setattr(node_making, "MAX_PIECE_BYTES", 37)
    taken = Taken()
    taken.make(1)
    taken.while_room = taken.part.close
    assert len(msgspec.msgpack.encode(trajectory(GROUP, 0))) > 2 * 37
    await taken.finish()
    assert len(taken.said) == 1
