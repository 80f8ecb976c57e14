"""Trajectories that followers make, over the real links: what each costs the leader.

What a follower says of a sample is what `app.node_making` says: that it began, signs of life, and
the trajectory in pieces. The leader's part is `app.spread_rollouts`. Making itself costs nothing.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from time import process_time
from typing import Any, Final

import msgspec

from libra import clock
from libra.ids import GroupId, InstanceId, NodeRank, PolicyVersion, PromptId
from libra.rollouts.group import AdmittedGroup, PromptRef
from libra.rollouts.trajectory import Trajectory
from libra.wire import node_rollouts as wire
from libra.wire.instance import VersionSpan
from libra_supervisor.app.node_making import pieces_of
from libra_supervisor.app.spread_rollouts import SpreadRollouts
from libra_supervisor.events import SampleFinished
from libra_supervisor.nodes.follower import FollowerEnd
from libra_supervisor.nodes.remote import RemoteNode
from libra_supervisor.rollouts.runner import SampleEvent

FINGERPRINTS: Final = ("bench",)
NUM_SAMPLES: Final = 8
GROUPS_AT_ONCE: Final = 4
"""For each follower."""

SIGNS_OF_LIFE: Final = 2
VOCABULARY: Final = 150_000
PROMPT_TOKENS: Final = 200


async def make(order: wire.MakeSamples, end: FollowerEnd, num_tokens: int, rng: Random) -> None:
    """What a follower says of the samples of one order."""
    group = AdmittedGroup(
        PromptRef(order.prompt_id, order.row, order.epoch), order.attempt, order.n_samples
    )
    for sample in order.samples:
        end.say(wire.SampleBegun(order.job, sample))
        for _ in range(SIGNS_OF_LIFE):
            end.say(wire.SampleAlive(order.job, sample))
        data = msgspec.msgpack.encode(_trajectory(group, sample, num_tokens, rng))
        for piece in pieces_of(data, job=order.job, sample=sample):
            await end.say_when_room(piece)


def _trajectory(group: AdmittedGroup, sample: int, num_tokens: int, rng: Random) -> Trajectory:
    sampled = num_tokens - PROMPT_TOKENS
    return Trajectory(
        trajectory_id=group.trajectory_id(sample),
        prompt_id=group.prompt.prompt_id,
        group_id=group.group_id,
        sample_index=sample,
        token_ids=tuple(rng.randrange(VOCABULARY) for _ in range(num_tokens)),
        loss_mask=(0,) * PROMPT_TOKENS + (1,) * sampled,
        rollout_logprobs=(0.0,) * PROMPT_TOKENS + tuple(-rng.random() for _ in range(sampled)),
        version_spans=(VersionSpan(PolicyVersion(1), PROMPT_TOKENS, num_tokens),),
        num_prompt_tokens=PROMPT_TOKENS,
        finish_reason="stop",
        reward=1.0,
        instance_ids=(InstanceId("vllm-1"),),
    )


class Nobody:
    """The leader's node makes nothing, and has nothing in flight."""

    def start(self, group: AdmittedGroup, samples: Sequence[int]) -> None:
        pass

    def cancel(self, group_id: GroupId) -> None:
        pass

    def ask_again(self, group_id: GroupId, samples: Sequence[int]) -> None:
        pass

    def num_in_flight(self, instance_id: InstanceId) -> int:
        del instance_id
        return 0


class Rollouts:
    """Keeps groups in progress on every follower, and counts what comes."""

    def __init__(self, nodes: Mapping[NodeRank, RemoteNode]) -> None:
        self.num_able = 0
        """Followers that make trajectories."""

        self.num_finished = 0
        self._num_begun = 0
        self._left: dict[GroupId, int] = {}
        self._num_nodes = len(nodes)
        nobody: Any = Nobody()
        self.spread = SpreadRollouts(
            nodes,
            term=1,
            traffic=nobody,
            fingerprints=FINGERPRINTS,
            token_file=Path("/no/token"),
            kv_capacity_by_tp={},
            post=self._post,
        )
        for rank, node in nodes.items():
            node.on_rollouts = partial(self._on_word, rank)
        self.spread.begin(nobody, nobody, note_served=lambda _: None)

    def _on_word(self, node: NodeRank, word: wire.RolloutWord) -> None:
        self.num_able += isinstance(word, wire.CanMake)
        self.spread.on_word(node, word)

    async def _post(self, event: SampleEvent) -> None:
        if not isinstance(event, SampleFinished):
            return
        self.num_finished += 1
        group_id = event.trajectory.group_id
        self._left[group_id] -= 1
        if not self._left[group_id]:
            del self._left[group_id]
            self.start_one()

    def start_one(self) -> None:
        self._num_begun += 1
        prompt = PromptRef(PromptId(f"p{self._num_begun}"), self._num_begun, 0)
        group = AdmittedGroup(prompt, 0, NUM_SAMPLES)
        self._left[group.group_id] = NUM_SAMPLES
        self.spread.start(group)

    async def measured(self, seconds: float) -> dict[str, Any]:
        """Of this process, which does nothing else; bytes are those it reads and writes."""
        while self.num_able < self._num_nodes:
            await clock.sleep(0.05)
        for _ in range(GROUPS_AT_ONCE * (self._num_nodes + 1)):
            self.start_one()  # the leader's node never ends its share
        await clock.sleep(seconds / 4)
        before, cpu_at, io_at = self.num_finished, process_time(), _io_bytes()
        began_at = clock.now()
        await clock.sleep(seconds)
        num = self.num_finished - before
        cpu_s, took_s = process_time() - cpu_at, clock.now() - began_at
        read, written = (now - then for now, then in zip(_io_bytes(), io_at, strict=True))
        return {
            "trajectories_per_s": round(num / took_s, 1),
            "cpu_us_per_trajectory": round(1e6 * cpu_s / num, 1),
            "leader_cpu_fraction": round(cpu_s / took_s, 3),
            "bytes_in_per_trajectory": round(read / num),
            "bytes_out_per_trajectory": round(written / num),
        }


def _io_bytes() -> tuple[int, int]:
    """That this process has read and written, sockets included."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["wchar"])
