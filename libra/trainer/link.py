"""The rank's end of its control socket.

A thread reads, so that the supervisor's death is noticed in the middle of a long step. The main
thread writes; so do work that it has left behind it, and the thread that judges ACKs, which a step
must not hold up.
"""

import os
import queue
import socket
import threading
import time
from contextlib import suppress
from fcntl import F_SETPIPE_SZ, fcntl
from pathlib import Path
from typing import TypeAlias

import msgspec

from libra.errors import PeerError, SiteError
from libra.wire.framing import FrameDecoder, encode_frame
from libra.wire.hybrid import FollowStep, JoinCore, OpenLanes
from libra.wire.rank import (
    AbortTransfer,
    ExportWeights,
    JudgeAcks,
    OfferWeights,
    RankCommand,
    RankEvent,
    SaveCheckpoint,
    SendWeights,
    Shutdown,
    TakeDevice,
    TrainStep,
)

EXIT_SUPERVISOR_GONE = 4
GRACE_S = 3.0
"""Given to the main thread to leave by itself before the process is ended under it."""

RECEIVE_BYTES = 1 << 20
PIPE_BYTES = 1 << 20


MainCommand: TypeAlias = (
    TrainStep
    | ExportWeights
    | OfferWeights
    | SendWeights
    | SaveCheckpoint
    | OpenLanes
    | JoinCore
    | FollowStep
    | TakeDevice
    | Shutdown
)
"""What the main thread does, in the order in which it comes."""


class SupervisorGoneError(PeerError):
    """The control socket closed without a Shutdown: nobody wants this rank's work any more."""

    exit_code = EXIT_SUPERVISOR_GONE


class Link:
    """Commands in, events out."""

    def __init__(self, path: Path) -> None:
        """Connect to the supervisor's socket. Raises SiteError when nobody listens there."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            raise SiteError(
                f"no supervisor listens on {path} ({error.strerror}); ranks are started by "
                "libra-supervisor, not by hand"
            ) from error
        self._commands: queue.SimpleQueue[MainCommand | Exception | None] = queue.SimpleQueue()
        self._ack_batches: queue.SimpleQueue[JudgeAcks | None] = queue.SimpleQueue()
        self._aborted: dict[str, str] = {}
        self._decode = msgspec.msgpack.Decoder(RankCommand).decode
        self._writing = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="link", daemon=True)
        self._reader.start()

    def receive(self) -> MainCommand:
        """The next command for the main thread; blocks.

        Raises SupervisorGoneError when there will be none, and what `interrupt` was given, in its
        turn among the commands.
        """
        command = self._commands.get()
        if isinstance(command, Exception):
            raise command
        if command is None:
            raise SupervisorGoneError("the supervisor closed the control socket")
        return command

    def receive_acks(self) -> JudgeAcks | None:
        """The next batch of ACKs to judge; blocks. None when there will be none."""
        return self._ack_batches.get()

    def abort_reason(self, group_id: str) -> str | None:
        """Why the supervisor wants the transfers of a group ended; None when it does not."""
        return self._aborted.get(group_id)

    def interrupt(self, error: Exception) -> None:
        """Have `receive` raise `error`: it happened in a thread that nobody waits for."""
        self._commands.put(error)

    def send_output(self, event: RankEvent) -> None:
        """Send the first event and two pipes, this process's stdout and stderr from now on.

        What C code prints comes through them too, so that each rank's output is known as its own.
        """
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        for _, write_fd in pipes:
            with suppress(PermissionError):  # more pipes than the user may make so wide
                fcntl(write_fd, F_SETPIPE_SZ, PIPE_BYTES)
        data = encode_frame(msgspec.msgpack.encode(event))
        try:
            sent = socket.send_fds(self._socket, [data], [read_fd for read_fd, _ in pipes])
            self._socket.sendall(data[sent:])
        except OSError as error:
            raise SupervisorGoneError(f"the control socket broke: {error.strerror}") from error
        for own_fd, (read_fd, write_fd) in enumerate(pipes, start=1):
            os.dup2(write_fd, own_fd)
            os.close(read_fd)
            os.close(write_fd)

    def send(self, event: RankEvent) -> None:
        """Send one event, from any thread; blocks while the supervisor does not read."""
        frame = encode_frame(msgspec.msgpack.encode(event))
        try:
            with self._writing:
                self._socket.sendall(frame)
        except OSError as error:
            raise SupervisorGoneError(f"the control socket broke: {error.strerror}") from error

    def _read(self) -> None:
        decoder = FrameDecoder()
        try:
            while chunk := self._socket.recv(RECEIVE_BYTES):
                for frame in decoder.feed(chunk):
                    command = self._decode(frame)
                    if isinstance(command, JudgeAcks):
                        self._ack_batches.put(command)
                        continue
                    if isinstance(command, AbortTransfer):
                        # The main thread looks at it while it waits for others.
                        self._aborted[command.group_id] = command.reason
                        continue
                    self._commands.put(command)
                    if isinstance(command, Shutdown):
                        return
        except (OSError, msgspec.MsgspecError, PeerError) as error:
            # Printed here, because the main thread may be in a collective that never ends.
            print(f"control socket: {error}", flush=True)  # noqa: T201
        self._ack_batches.put(None)
        self._commands.put(None)
        time.sleep(GRACE_S)
        os._exit(EXIT_SUPERVISOR_GONE)
