"""python -m libra.rewards.worker ORDER: scores one case after another until its socket closes.

The pool limits its memory, kills it at the time limit and starts another. Whatever the reward
function prints goes to this process's log; answers have a channel of their own.
"""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from libra.errors import LibraError
from libra.rewards.case import RewardCase
from libra.rewards.coercion import RewardFailed, coerced
from libra.rewards.loading import RewardFunction, load_reward
from libra.rewards.messages import (
    Scored,
    WorkerMessage,
    WorkerOrder,
    WorkerReady,
    WorkerUnusable,
    case_of,
)
from libra.user_code import error_in_words
from libra.wire.framing import FrameDecoder, encode_frame

_CHUNK_BYTES = 1 << 16


def main() -> None:
    order = msgspec.json.decode(sys.argv[1], type=WorkerOrder)
    with _connected(Path(order.socket_path)) as connection:
        try:
            function = load_reward(order.reward, order.reward_args)
        except LibraError as error:
            _send(connection, WorkerUnusable(order.incarnation, str(error)))
            sys.exit(error.exit_code)
        _send(connection, WorkerReady(order.incarnation))
        # A supervisor that was killed has left words unread.
        with suppress(ConnectionResetError, BrokenPipeError):
            _answer(connection, function)


def _answer(connection: socket.socket, function: RewardFunction) -> None:
    own_pid = os.getpid()
    for frame in _frames(connection):
        outcome = score(function, case_of(frame))
        if os.getpid() != own_pid:
            # The reward forked and came back twice: a second answer would be the next case's.
            os._exit(0)
        _send(connection, outcome)


def score(function: RewardFunction, case: RewardCase) -> Scored | RewardFailed:
    """Call the reward function; whatever it raises is this sample's failure."""
    try:
        result = coerced(function(case))
    except SystemExit as error:
        return RewardFailed(f"called sys.exit({error.code!r})")
    except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt raised by a library included
        return RewardFailed(error_in_words(error))
    return result if isinstance(result, RewardFailed) else Scored(result)


def _connected(path: Path) -> socket.socket:
    """Connect to a socket whose path may be longer than the 107 bytes an address holds."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
    return connection


def _send(connection: socket.socket, message: WorkerMessage) -> None:
    connection.sendall(encode_frame(msgspec.msgpack.encode(message)))


def _frames(connection: socket.socket) -> Iterator[bytes]:
    decoder = FrameDecoder()
    while chunk := connection.recv(_CHUNK_BYTES):
        yield from decoder.feed(chunk)


if __name__ == "__main__":
    main()
