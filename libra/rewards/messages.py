"""What the pool and one reward worker say to each other: framed msgpack over a Unix socket."""

from typing import Any, TypeAlias

import msgspec

from libra.rewards.case import RewardCase
from libra.rewards.coercion import RewardFailed


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's one command line argument, as JSON."""

    socket_path: str
    incarnation: str
    """Sent back in the first message, so that the pool knows who connects."""

    reward: str
    reward_args: dict[str, Any]


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """First message: the reward function is loaded."""

    incarnation: str


class WorkerUnusable(msgspec.Struct, frozen=True, tag=True):
    """First and last message: the reward function cannot be loaded."""

    incarnation: str
    reason: str


class Scored(msgspec.Struct, frozen=True, tag=True):
    """The finite reward of the case that was sent last."""

    value: float


WorkerMessage: TypeAlias = WorkerReady | WorkerUnusable | Scored | RewardFailed

case_of = msgspec.msgpack.Decoder(RewardCase).decode
message_of = msgspec.msgpack.Decoder(WorkerMessage).decode
