"""Heads and members of lanes in one process, for tests of the channel."""

import socket
from contextlib import contextmanager

import numpy as np

from libra import clock
from libra.hybrid.address import LaneHello
from libra.hybrid.head import LaneHead
from libra.hybrid.header import Fence, run_hash
from libra.hybrid.member import MemberLane
from libra.hybrid.terms import LaneTerms
from libra.ids import ReplicaId, RunId

KEY = bytes(range(32))
RUN = run_hash(RunId("run-under-test"))
COUNT = 70_001
LAYOUT = "layout"
DIGEST = 77
HYBRID = ReplicaId("hybrid-0")
_LANES = []
LONG_S = 60.0
"""A wait that ends by what is waited for."""


@contextmanager
def head(*, key=KEY, host="", count=COUNT, frame_timeout_s=LONG_S, max_kept=32):
    terms = LaneTerms(run_hash=RUN, count=count, frame_timeout_s=frame_timeout_s)
    one = LaneHead(terms, key=key, lane=0, layout_hash=LAYOUT, host=host, max_kept=max_kept)
    try:
        yield one
    finally:
        one.close()
        while _LANES:
            _LANES.pop().close()


def hello(**says):
    usual = {"replica_id": HYBRID, "lane": 0, "layout_hash": LAYOUT, "step": 1, "digest": DIGEST}
    return LaneHello(**{**usual, **says})


def member(address, *, key=KEY, count=COUNT, run=RUN, **says):
    lane = MemberLane(
        address, key=key, run_hash=run, hello=hello(**says), count=count, timeout_s=LONG_S
    )
    _LANES.append(lane)
    return lane


def values(seed=0, count=COUNT):
    return np.random.default_rng(seed).standard_normal(count, dtype=np.float32)


def sends(gradient):
    """For `send_gradient`."""
    return lambda room: np.copyto(room, gradient)


def collect(one, wanted=None, *, replica_id=HYBRID, within_s=LONG_S):
    wanted = wanted or fence()
    deadline = clock.monotonic() + within_s
    return one.collect(replica_id, wanted, deadline=deadline, beat=lambda: None)


def fence(step=1, mini_batch=0, epoch=1, version=0):
    return Fence(step=step, mini_batch=mini_batch, epoch=epoch, version=version)


def publish(one, gradient, step=1, *, digest=DIGEST, numbers=(1.5,)):
    room = one.buffer()
    np.copyto(room, gradient)
    one.publish(fence(step), numbers, room, digest=digest)


def raw_connection(address):
    """A socket to a head, with nothing said."""
    if address.unix:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect("\0" + address.unix)
    else:
        connection = socket.create_connection((address.host, address.port))
    connection.settimeout(LONG_S)
    return connection


def read_all(connection):
    """What comes until the other side closes."""
    found = b""
    while True:
        try:
            chunk = connection.recv(1 << 16)
        except ConnectionResetError:
            return found
        if not chunk:
            return found
        found += chunk
