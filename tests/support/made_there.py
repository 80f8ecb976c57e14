"""A follower that makes trajectories, on fake servers, for a leader whose own runner is a list."""

import os
import sys
from contextlib import asynccontextmanager
from functools import partial
from random import Random

import anyio

from fake_runs import write_config
from fake_vllm import FakeVllm
from libra.config.dump import dump_resolved
from libra.config.load import load_config
from libra.wire.api import NodeStatus
from libra_supervisor.app.node_making import MakingSite, NodeMaking
from libra_supervisor.app.prompts import fingerprints_of, open_prompts
from libra_supervisor.app.spread_rollouts import SpreadRollouts
from libra_supervisor.events import SampleFinished, SampleGaveUp, SampleStarted
from libra_supervisor.run_directory import RunDirectory
from processes import site, until
from two_nodes import two_nodes

TOKEN = "a token of the servers"


def answer(prompt, body, version):
    """Ids that every tokenizer of the tests has, by what was asked for."""
    first = sum(prompt) + body["seed"] % 1000 + 7 * version
    return [20 + (first + k) % 60 for k in range(body["max_tokens"])]


class OwnRunner:
    """What the leader's node was asked to make."""

    def __init__(self):
        self.orders = []

    def start(self, group, samples):
        self.orders.append(("start", group.group_id, samples))

    def cancel(self, group_id):
        self.orders.append(("cancel", group_id))

    def ask_again(self, group_id, samples):
        self.orders.append(("again", group_id, samples))

    @property
    def started(self):
        return {order[1]: order[2] for order in self.orders if order[0] == "start"}


class Idle:
    """The leader's own scheduler has nothing anywhere."""

    def num_in_flight(self, _instance_id):
        return 0


class MadeThere:
    """Both sides, and what the loop got to hear."""

    def __init__(self, config, directory, prompts, nodes, place):
        self.config, self.directory, self.nodes, self.place = config, directory, nodes, place
        self.prompts = prompts
        self.servers, self.posted, self.served = {}, [], []
        self.own, self.evaluations = OwnRunner(), OwnRunner()
        self.rollouts = SpreadRollouts(
            {1: nodes.node},
            term=1,
            traffic=Idle(),
            fingerprints=fingerprints_of(prompts),
            token_file=directory.token,
            kv_capacity_by_tp={},
            post=self.post,
        )
        nodes.node.on_rollouts = partial(self.rollouts.on_word, 1)
        nodes.listener = self.rollouts

    async def post(self, event):
        self.posted.append(event)

    def of(self, kind):
        return [event for event in self.posted if isinstance(event, kind)]

    def trajectories(self):
        return {it.trajectory.trajectory_id: it.trajectory for it in self.of(SampleFinished)}

    def each_once(self):
        """Whatever was made twice, the loop heard of each sample's begin and end once."""
        begun = [(it.group_id, it.sample_index) for it in self.of(SampleStarted)]
        ended = [it.trajectory.trajectory_id for it in self.of(SampleFinished)]
        ended += [(it.group_id, it.sample_index) for it in self.of(SampleGaveUp)]
        assert len(set(begun)) == len(begun)
        assert len(set(ended)) == len(ended)

    def begin(self):
        self.rollouts.begin(self.own, self.evaluations, note_served=self.served.append)

    @property
    def is_able(self):
        """Whether the follower gets groups: one that the leader's node is too busy for."""
        return self.rollouts._spread.is_able(1)

    def why_not(self):
        status = NodeStatus(node=1, host="h", state="member", since_s=1.0, detail="")
        return self.rollouts.status((status,))[0].detail

    async def serve(self, name):
        """Another process of a server, at another port."""
        self.servers[name] = FakeVllm(name, token=TOKEN, answer=answer)
        await self.servers[name].__aenter__()

    def know(self, name, *, version=None, incarnation="a"):
        server = self.servers[name]
        roster = self.rollouts.roster
        roster.know(
            name, incarnation, url=server.url, tp=1, kv_capacity_tokens=1000, is_planned=False
        )
        if version is not None:
            roster.serve(name, version)
        self.rollouts.note_roster()

    def withdraw(self, name, *, is_draining=True):
        self.rollouts.roster.withdraw(name, is_draining=is_draining)
        self.rollouts.note_roster()

    def in_flight(self, name):
        return self.rollouts.num_in_flight(name)

    async def until_able(self):
        await until(lambda: self.is_able, within_s=60)


@asynccontextmanager
async def made_there(tmp_path, *, servers=("vllm-0",), begins=True, overrides=(), **options):
    path = write_config(tmp_path, total_steps=1, **options)
    config = load_config(path, overrides, purpose="plan").config
    user_code = os.pathsep.join(filter(None, [*sys.path, str(tmp_path)]))
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.resolved_config_json.write_bytes(dump_resolved(config))
    directory.token.write_text(TOKEN + "\n")
    prompts = open_prompts(config)
    own = RunDirectory(directory.root / "nodes" / "1")
    own.create()
    async with site(directory.root) as place:

        def make(end, tasks):
            return NodeMaking(
                MakingSite(
                    node=1,
                    run_id=place.run_id,
                    directory=directory,
                    own=own,
                    environ={**os.environ, "PYTHONPATH": user_code},
                    spawner=place.spawner,
                    say=end.say,
                    say_when_room=end.say_when_room,
                    rng=Random(5),
                ),
                tasks,
            )

        async with two_nodes(place, make) as nodes, anyio.create_task_group() as tasks:
            made = MadeThere(config, directory, prompts, nodes, place)
            for name in servers:
                await made.serve(name)
            tasks.start_soon(made.rollouts.run)
            if begins:
                made.begin()
                for name in servers:
                    made.know(name, version=0)
                await made.until_able()
            try:
                yield made
            finally:
                with anyio.CancelScope(shield=True):
                    for server in made.servers.values():
                        server.freeze_tokens = False
                        await server.stop()
            tasks.cancel_scope.cancel()
