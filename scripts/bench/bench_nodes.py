#!/usr/bin/env python3
"""The leader's end of its links at 2, 8, 64 and 512 followers, as JSON. About 3 minutes.

    scripts/bench/bench_nodes.py [--followers 2,8,64,512] [--seconds 10] [--lease 5]
    scripts/bench/bench_nodes.py --tokens 1000 [--followers 2,8] [--seconds 10]

With --tokens followers make trajectories of that length as fast as they can, and nothing else is
measured: bytes and the leader's CPU for each.

The protocol and the sockets are real; the followers' children are fake. All followers are one other
process. Each has eight ranks that say one thing a second, as a rank between two micro-batches
does, and is told 1 KB a second; the leader has a round trip with every one of them each second.
Then versions are published to a fake server on every follower (`nodes_bed`), from the trainer's
word that one is written to the commit. Then a part of the followers dies without a word, as with
their machines: measured is the time until the leader says that they are lost, until their servers
are out of routing, and until trajectories are asked for anew with what is left.
"""

# ruff: noqa: S311 - made-up load needs no secrets

import argparse
import json
import os
import platform
import subprocess
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from time import process_time
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "supervisor"), str(ROOT / "tests/support")]

import anyio  # noqa: E402 - after the path is set
import anyio.abc  # noqa: E402
import msgspec  # noqa: E402
import structlog  # noqa: E402
from nodes_bed import HOST, FakeServer, clients_of, losses, publications  # noqa: E402
from nodes_trajectories import FINGERPRINTS, Rollouts, make  # noqa: E402

from libra import clock  # noqa: E402
from libra.ids import ChildId, Incarnation, NodeRank, RunId  # noqa: E402
from libra.wire import node as wire  # noqa: E402
from libra.wire.node import PROTOCOL, Hello, NodeCommand, Welcome  # noqa: E402
from libra.wire.node_rollouts import CanMake, MakeSamples, TakePart  # noqa: E402
from libra.wire.rank import Heartbeat  # noqa: E402
from libra_supervisor.nodes.allegiance import Allegiance  # noqa: E402
from libra_supervisor.nodes.follower import FollowerEnd  # noqa: E402
from libra_supervisor.nodes.leader import ClusterEvent, LeaderEnd, NodeSaid  # noqa: E402
from libra_supervisor.nodes.lease import LeaseTerms  # noqa: E402
from libra_supervisor.nodes.members import Charter, NodeJoined, NodeLost  # noqa: E402
from libra_supervisor.nodes.remote import RemoteNode  # noqa: E402
from libra_supervisor.nodes.session import KeepLimits  # noqa: E402
from libra_supervisor.nodes.transport import dialled, node_listener  # noqa: E402

TOKEN = "a token of the benchmark"  # noqa: S105 - nobody else listens
NUM_RANKS = 8
TOLD_BYTES = 1024
JOIN_S = 120.0


class FakeHands:
    """Answers what has an answer; owns nothing."""

    end: FollowerEnd

    def __init__(
        self, server: FakeServer, tasks: anyio.abc.TaskGroup, num_tokens: int, rng: Random
    ) -> None:
        """`num_tokens` of the trajectories that it makes."""
        self._server = server
        self._tasks = tasks
        self._num_tokens = num_tokens
        self._rng = rng

    def children(self) -> tuple[ChildId, ...]:
        return ()

    async def begin(self, welcome: Welcome) -> None:
        pass

    async def obey(self, command: NodeCommand) -> None:
        match command:
            case wire.Tail(call):
                self.end.say(wire.Lines(call, ()))
            case wire.HoldPort(call):
                self.end.say(wire.PortHeld(call, self._server.port))
            case wire.ReadWeights(call):
                self.end.say(wire.WeightsRead(call, None))
            case TakePart():
                self.end.say(CanMake(FINGERPRINTS))
            case MakeSamples():
                self._tasks.start_soon(make, command, self.end, self._num_tokens, self._rng)
            case _:
                pass

    async def let_go(self, reason: str) -> None:
        pass

    async def end_servers(self, reason: str) -> None:
        pass


async def one_follower(number: int, port: int, lease_s: float, num_tokens: int) -> None:
    about = Hello(
        protocol=PROTOCOL, version="bench", config_digest="d", run_id="", node=NodeRank(number),
        host="h", boot_id=str(number), pid=1, start_ticks=1, dial=0,
    )  # fmt: skip
    terms = LeaseTerms(lease_s=lease_s, orphan_grace_s=0.0)
    server = FakeServer(number)
    side = Allegiance(about, terms, KeepLimits(), now=clock.now())
    rng = Random(number)
    beat = msgspec.msgpack.encode(Heartbeat(0, 1, "forward"))

    async def speak() -> None:
        while not num_tokens:
            await clock.sleep(rng.uniform(0.5, 1.5) / NUM_RANKS)
            hands.end.say(wire.FromRank(1, beat))

    async with anyio.create_task_group() as tasks:
        hands = FakeHands(server, tasks, num_tokens, rng)
        hands.end = FollowerEnd(
            side, hands, dial=lambda: dialled(HOST, port, token=TOKEN), rng=Random(number)
        )
        tasks.start_soon(server.run)
        tasks.start_soon(speak)
        await hands.end.run()


async def followers(first: int, last: int, port: int, lease_s: float, num_tokens: int) -> None:
    """Many in one process; they end with it, without a word."""
    async with anyio.create_task_group() as tasks:
        for number in range(first, last + 1):
            tasks.start_soon(one_follower, number, port, lease_s, num_tokens)
            await clock.sleep(0.002)


class Leader:
    """What the control plane does with its links, and how often."""

    def __init__(self, count: int, lease_s: float) -> None:
        charter = Charter(
            run_id=RunId("bench"), run_directory="/", term=1, leader="L", version="bench",
            config_digest="d", num_nodes=count + 1,
            lease=LeaseTerms(lease_s=lease_s, orphan_grace_s=0.0),
        )  # fmt: skip
        self.end = LeaderEnd(charter, post=self.post, rng=Random(1))
        self.nodes = {
            NodeRank(rank): RemoteNode(NodeRank(rank), self.end) for rank in range(1, count + 1)
        }
        self.num_events = 0
        self.num_told = 0
        self.lost_at: dict[NodeRank, float] = {}
        self.round_trips: list[float] = []

    async def post(self, event: ClusterEvent) -> None:
        match event:
            case NodeSaid(node, said):
                self.num_events += 1
                self.nodes[node].on_said(said)
            case NodeJoined(node):
                self.nodes[node].on_joined(())
            case NodeLost(node, reason):
                self.lost_at[node] = clock.now()
                self.nodes[node].on_lost(reason)
            case _:
                pass

    async def talk_to(self, node: RemoteNode, rng: Random) -> None:
        """A kilobyte and a round trip each second."""
        while True:
            await clock.sleep(rng.uniform(0.5, 1.5))
            if not node.is_member:
                continue
            node.say(wire.ToRank(1, b"x" * TOLD_BYTES))
            began_at = clock.now()
            await node.ask(wire.Lines, lambda call: wire.Tail(call, Incarnation("x"), 0))
            self.round_trips.append(clock.now() - began_at)
            self.num_told += 2


def started(
    first: int, last: int, port: int, lease_s: float, num_tokens: int = 0
) -> "subprocess.Popen[bytes]":
    words = [str(it) for it in (first, last, port, lease_s, num_tokens)]
    return subprocess.Popen([sys.executable, __file__, "--as-followers", *words])


async def measured(count: int, seconds: float, lease_s: float) -> dict[str, Any]:
    leader = Leader(count, lease_s)
    num_doomed = max(1, count // 8)
    async with node_listener(leader.end.serve, host=HOST, port=0, token=TOKEN) as port:
        doomed = started(1, num_doomed, port, lease_s)
        others = started(num_doomed + 1, count, port, lease_s)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leader.end.run)
                await until_joined(leader)
                result = await under_load(leader, seconds, tasks)
                async with AsyncExitStack() as stack:
                    clients = await clients_of(leader.nodes, stack)
                    result |= await publications(leader.nodes, clients)

                    def kill() -> list[NodeRank]:
                        leader.lost_at.clear()
                        doomed.kill()
                        return [NodeRank(rank) for rank in range(1, num_doomed + 1)]

                    result |= await losses(leader.nodes, clients, kill, leader.lost_at)
                tasks.cancel_scope.cancel()
        finally:
            for process in (doomed, others):
                process.kill()
                process.wait()
    return {"followers": count, **result}


async def trajectories(
    count: int, seconds: float, lease_s: float, num_tokens: int
) -> dict[str, Any]:
    leader = Leader(count, lease_s)
    async with node_listener(leader.end.serve, host=HOST, port=0, token=TOKEN) as port:
        makers = started(1, count, port, lease_s, num_tokens)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leader.end.run)
                await until_joined(leader)
                rollouts = Rollouts(leader.nodes)
                tasks.start_soon(rollouts.spread.run)
                result = await rollouts.measured(seconds)
                tasks.cancel_scope.cancel()
        finally:
            makers.kill()
            makers.wait()
    return {"followers": count, "tokens": num_tokens, **result}


async def until_joined(leader: Leader) -> None:
    with anyio.fail_after(JOIN_S):
        while not all(node.is_member for node in leader.nodes.values()):
            await clock.sleep(0.05)


async def under_load(leader: Leader, seconds: float, tasks: anyio.abc.TaskGroup) -> dict[str, Any]:
    for rank, node in leader.nodes.items():
        tasks.start_soon(talk_to_until_lost, leader, node, Random(rank))
    await clock.sleep(2.0)
    leader.num_events = leader.num_told = 0
    leader.round_trips.clear()
    began_at, cpu_at = clock.now(), process_time()
    await clock.sleep(seconds)
    took_s, cpu_s = clock.now() - began_at, process_time() - cpu_at
    num_messages = leader.num_events + leader.num_told
    trips = sorted(leader.round_trips)
    return {
        "messages_per_s": round(num_messages / took_s, 1),
        "leader_cpu_fraction": round(cpu_s / took_s, 4),
        "cpu_us_per_message": round(1e6 * cpu_s / num_messages, 1),
        "round_trip_p50_ms": round(1e3 * median(trips), 2),
        "round_trip_p99_ms": round(1e3 * trips[int(0.99 * (len(trips) - 1))], 2),
    }


async def talk_to_until_lost(leader: Leader, node: RemoteNode, rng: Random) -> None:
    try:
        await leader.talk_to(node, rng)
    except Exception as error:
        if node.is_member:
            raise RuntimeError(f"a member does not answer: {error}") from error


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--followers", default="2,8,64,512")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--lease", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--as-followers", nargs=5)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    if options.as_followers:
        first, last, port, lease_s, num_tokens = options.as_followers
        anyio.run(
            followers, int(first), int(last), int(port), float(lease_s), int(num_tokens),
            backend_options={"use_uvloop": True},
        )  # fmt: skip
        return 0
    what = partial(trajectories, num_tokens=options.tokens) if options.tokens else measured
    results = [
        anyio.run(
            what, int(count), options.seconds, options.lease,
            backend_options={"use_uvloop": True},
        )
        for count in options.followers.split(",")
    ]  # fmt: skip
    report = {
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "cpu": platform.machine()},
        "lease_s": options.lease,
        "results": results,
    }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
