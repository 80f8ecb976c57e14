#!/usr/bin/env python3
"""Hybrid replicas: the lanes' GB/s beside memcpy and raw sockets; with --gangs what a join costs.

    scripts/bench/bench_hybrid.py [--megabytes 256] [--repeats 7] [--streams 1,2,4]
                                  [--gangs MODEL]

The lanes run between two processes. Measured per gradient: from the member's first byte until the
head has copied, summed and checked it (`up`), and from `publish` until the member has checked it
(`down`); over TCP with each number of streams. The peers move as many bytes in the same run,
without any check: a copy in memory, and blocking sockets between two processes. `--gangs` starts a
core and a replica under torchrun on the CPU with a model in Hugging Face format, and times each
phase of a join, and a core's step with its own samples alone and with a member besides, whose
samples have no token to train: the core computes the same, so the difference is the exchange's and
what two gangs take from each other's cores.
Prints JSON.
"""

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "supervisor"), str(ROOT / "tests/support")]

from libra.hybrid.address import LaneHello  # noqa: E402
from libra.hybrid.channel import no_beat  # noqa: E402
from libra.hybrid.head import LaneHead  # noqa: E402
from libra.hybrid.header import Fence, run_hash  # noqa: E402
from libra.hybrid.member import MemberLane  # noqa: E402
from libra.hybrid.terms import LaneTerms  # noqa: E402
from libra.ids import ReplicaId, RunId  # noqa: E402
from libra.wire.hybrid import LaneAddress  # noqa: E402

KEY = b"k" * 32
RUN = run_hash(RunId("bench"))
NAME = ReplicaId("hybrid-0")
LONG_S = 120.0
CHUNK_BYTES = 4 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--streams", default="1,2,4", help="connections of a lane over TCP")
    parser.add_argument("--gangs", type=Path, help="directory of a model in Hugging Face format")
    options = parser.parse_args()
    count = options.megabytes * 1_000_000 // 4
    result: dict[str, Any] = {
        "megabytes": options.megabytes,
        "memcpy_gb_s": summary(
            [gb_s(count, seconds) for seconds in copies_s(count, options.repeats)]
        ),
    }
    for kind in ("unix", "tcp"):
        raw = [gb_s(count, seconds) for seconds in raw_socket(kind, count, options.repeats)]
        result[f"raw_{kind}_gb_s"] = summary(raw)
    lanes = {"shared_memory": ("unix", 1)}
    lanes |= {f"tcp_{number}": ("tcp", int(number)) for number in options.streams.split(",")}
    for name, (kind, num_streams) in lanes.items():
        up, down = lane(kind, count, options.repeats, num_streams=num_streams)
        result[f"lane_{name}_up_gb_s"] = summary([gb_s(count, seconds) for seconds in up])
        result[f"lane_{name}_down_gb_s"] = summary([gb_s(count, seconds) for seconds in down])
    if options.gangs is not None:
        result["gangs"] = gangs(options.gangs)
    print(json.dumps(result, indent=1))


def gb_s(count: int, seconds: float) -> float:
    return 4 * count / seconds / 1e9


def summary(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "most": round(max(values), 3),
    }


def copies_s(count: int, repeats: int) -> list[float]:
    source, target = np.ones(count, np.float32), np.ones(count, np.float32)
    found = []
    for _ in range(repeats):
        began_at = time.monotonic()
        np.copyto(target, source)
        found.append(time.monotonic() - began_at)
    return found


def raw_socket(kind: str, count: int, repeats: int) -> list[float]:
    """Seconds from the sender's first byte to the receiver's last."""
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind("\0libra-bench-raw" if kind == "unix" else ("127.0.0.1", 0))
    listener.listen()
    child = multiprocessing.get_context("spawn").Process(
        target=raw_sender, args=(family, listener.getsockname(), count, repeats)
    )
    child.start()
    connection, _ = listener.accept()
    target, found = memoryview(bytearray(4 * count)), []
    for _ in range(repeats):
        began_at = np.frombuffer(receive(connection, memoryview(bytearray(8))), np.float64)[0]
        receive(connection, target)
        found.append(time.monotonic() - float(began_at))
        connection.sendall(b"1")
    child.join()
    connection.close()
    listener.close()
    return found


def raw_sender(family: int, address: Any, count: int, repeats: int) -> None:
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.connect(address)
    values = memoryview(np.ones(count, np.float32)).cast("B")
    for _ in range(repeats):
        connection.sendall(np.float64(time.monotonic()).tobytes())
        connection.sendall(values)
        connection.recv(1)


def receive(connection: socket.socket, target: memoryview) -> memoryview:
    view = target
    while view:
        view = view[connection.recv_into(view[:CHUNK_BYTES]) :]
    return target


def lane(
    kind: str, count: int, repeats: int, *, num_streams: int
) -> tuple[list[float], list[float]]:
    """Seconds of each gradient to the head, and of each reduced one back."""
    terms = LaneTerms(run_hash=RUN, count=count, frame_timeout_s=LONG_S)
    head = LaneHead(terms, key=KEY, lane=0, layout_hash="bench", host="127.0.0.1")
    address = head.unix_address if kind == "unix" else head.tcp_address
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=be_member, args=(address, count, repeats, num_streams, theirs))
    child.start()
    up, down = [], []
    for step in range(1, repeats + 1):
        fence = Fence(step, 0, 1, 0)
        head.begin(step, 0, [NAME])
        if step == 1:
            ours.recv()  # it is let in
        came = head.collect(NAME, fence, deadline=time.monotonic() + LONG_S, beat=no_beat)
        done_at = time.monotonic()
        head.release(NAME)
        up.append(done_at - came.numbers[0])
        room = head.buffer()
        room[:] = step
        published_at = time.monotonic()
        head.publish(fence, (), room, digest=0)
        down.append(ours.recv() - published_at)
    child.join()
    head.close()
    return up, down


def be_member(
    address: LaneAddress, count: int, repeats: int, num_streams: int, parent: Any
) -> None:
    hello = LaneHello(
        replica_id=NAME,
        lane=0,
        layout_hash="bench",
        step=1,
        digest=0,
        num_streams=num_streams,
    )
    one = MemberLane(address, key=KEY, run_hash=RUN, hello=hello, count=count, timeout_s=LONG_S)
    gradient = np.ones(count, np.float32)
    parent.send("in")
    for step in range(1, repeats + 1):
        fence = Fence(step, 0, 1, 0)
        began_at = time.monotonic()
        one.send_gradient(fence, (began_at,), lambda room: np.copyto(room, gradient))
        one.receive_reduced(timeout_s=LONG_S, beat=no_beat)
        parent.send(time.monotonic())
        one.applied(fence, 0)
    one.close()


def gangs(model: Path, *, num_steps: int = 9) -> dict[str, Any]:
    from hybrid_run import HybridRun, Membership  # noqa: PLC0415 - torch's
    from trainer_ranks import make_samples, run_config  # noqa: PLC0415

    config = run_config(model, micro_batch_size=8)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began_at = time.monotonic()
        found = work()
        seconds[name] = round(time.monotonic() - began_at, 3)
        return found

    def samples(step: int) -> list[Any]:
        return make_samples(step, 8, vocab_size)

    def with_empty(step: int) -> list[Any]:
        # Every second sample, which is the member's, has no token to train.
        own = samples(step)
        empty = [structs.replace(it, loss_mask=bytes(len(it.loss_mask))) for it in own]
        return [it for pair in zip(own, empty, strict=True) for it in pair]

    with (
        tempfile.TemporaryDirectory() as directory,
        HybridRun(config, Path(directory), 1, replica_size=1) as run,
    ):
        timed("start_core_s", run.until_ready)
        name = run.start("hybrid-0")
        timed("start_replica_s", run.until_ready)
        run.open_lanes()
        alone = [step_s(run, step, [samples(step)]) for step in range(1, num_steps + 1)]
        snapshot = timed("snapshot_s", lambda: run.snapshot(num_steps))
        timed("load_and_connect_s", lambda: run.join(name, snapshot))
        who = Membership(members=[name])
        steps = range(num_steps + 1, 2 * num_steps + 1)
        joined = [step_s(run, step, [with_empty(step)], who) for step in steps]
    return {
        **seconds,
        "step_alone_s": summary(alone[1:]),
        "step_with_member_s": summary(joined[1:]),
    }


def step_s(run: Any, step: int, batch: Any, who: Any = None) -> float:
    return float(run.train(step, batch, who=who).metrics.train_s)


if __name__ == "__main__":
    main()
