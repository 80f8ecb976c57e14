"""The loop's messages to the ranks, sent in order by one task."""

from pathlib import Path
from typing import TypeAlias

import anyio
import anyio.to_thread
import msgspec
import structlog
from msgspec.structs import replace

from libra.errors import PeerError
from libra.ids import Rank
from libra.storage.checkpoints import newest_checkpoint, read_rollout_state
from libra.wire.rank import MiniBatch, RankCommand, TrainStep
from libra_supervisor.events import CheckpointChosen, Event
from libra_supervisor.inbox import Inbox
from libra_supervisor.ports import Shards
from libra_supervisor.ranks.gang import Gang
from libra_supervisor.run_directory import RunDirectory

_log = structlog.get_logger()
_QUEUE = 256


class _ToAll(msgspec.Struct, frozen=True):
    attempt: int
    command: RankCommand


class _ToRankZero(msgspec.Struct, frozen=True):
    attempt: int
    command: RankCommand


class _Shards(msgspec.Struct, frozen=True):
    attempt: int
    command: TrainStep
    shards: tuple[tuple[MiniBatch, ...], ...]


_Letter: TypeAlias = _ToAll | _ToRankZero | _Shards


class RankMail:
    """`libra_supervisor.ports.Ranks` over a gang. `run` is its task."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._send, self._receive = anyio.create_memory_object_stream[_Letter](_QUEUE)

    def tell_all(self, attempt: int, command: RankCommand) -> None:
        self._send.send_nowait(_ToAll(attempt, command))

    def tell_rank_zero(self, attempt: int, command: RankCommand) -> None:
        self._send.send_nowait(_ToRankZero(attempt, command))

    def train(self, attempt: int, command: TrainStep, shards: Shards) -> None:
        self._send.send_nowait(_Shards(attempt, command, tuple(shards)))

    async def run(self) -> None:
        async for letter in self._receive:
            if letter.attempt != self._gang.attempt:
                _log.info("rank_message_dropped", why=f"attempt {letter.attempt} is over")
                continue
            try:
                await self._deliver(letter)
            except PeerError as error:
                # The gang notices the loss itself, and what was asked begins anew with the next.
                _log.warning("rank_message_dropped", why=str(error))

    async def _deliver(self, letter: _Letter) -> None:
        match letter:
            case _ToAll(command=command):
                await self._gang.broadcast(command)
            case _ToRankZero(command=command):
                await self._gang.send(Rank(0), command)
            case _Shards(command=command, shards=shards):
                await self._gang.send_each(
                    {
                        rank: replace(command, mini_batches=shards[hello.dp_rank])
                        for rank, hello in self._gang.members.items()
                    }
                )


class CheckpointChooser:
    """Which checkpoint an attempt starts from; tells the loop before any rank starts."""

    def __init__(self, directory: RunDirectory, inbox: Inbox[Event]) -> None:
        self._directory = directory
        self._inbox = inbox

    async def __call__(self, attempt: int) -> Path | None:
        """The newest complete checkpoint of the run; None begins anew.

        Raises DataError when the run has checkpoints of which none can be used.
        """
        found = await anyio.to_thread.run_sync(_newest, self._directory)
        if found is None:
            await self._inbox.post(CheckpointChosen(attempt, 0, None))
            return None
        step, path, rollout_state, skipped = found
        for reason in skipped:
            _log.warning("checkpoint_skipped", why=reason)
        _log.info("checkpoint_chosen", attempt=attempt, step=step, directory=str(path))
        await self._inbox.post(CheckpointChosen(attempt, step, rollout_state))
        return path


def _newest(directory: RunDirectory) -> tuple[int, Path, bytes, tuple[str, ...]] | None:
    newest = newest_checkpoint(directory.checkpoints)
    if newest is None:
        return None
    state = read_rollout_state(newest.directory)
    return newest.step, newest.directory, state, newest.newer_skipped
