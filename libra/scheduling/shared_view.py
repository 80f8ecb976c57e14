"""What the other schedulers of a fleet have in flight, judged from the files they leave.

Liveness: a rank lives while its file keeps changing, seen on the reader's own monotonic clock. No
two clocks are compared, so a wrong or future time stamp can neither keep a dead rank alive nor kill
a living one. Loads are keyed by (instance, incarnation), so what was in flight on a process that is
gone counts for nobody.
"""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from libra.ids import Incarnation, InstanceId
from libra.scheduling.load import BoundedInt, OwnLoad, RemoteLoad

FORMAT = 1
Key: TypeAlias = tuple[InstanceId, Incarnation]


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one rank's file."""

    format: int
    rank: str
    writer: str
    """Random per process: tells two processes apart that were given the same rank."""

    sequence: BoundedInt
    """Grows with every write of one writer."""

    written_at_ns: BoundedInt
    """The writer's wall clock, only to report skew."""

    load: tuple[OwnLoad, ...]


class _Seen:
    """The last readable content of one rank, and when it last changed."""

    __slots__ = ("changed_at", "content", "former_writers", "skew_s")

    def __init__(self, content: RankLoad, now: float) -> None:
        self.content = content
        self.changed_at = now
        self.former_writers: set[str] = set()
        self.skew_s = 0.0


class SharedView:
    """Takes in what was read, answers the summed load of the others."""

    def __init__(self, *, own_rank: str, own_writer: str, ttl_s: float) -> None:
        self._own_rank = own_rank
        self._own_writer = own_writer
        self._ttl_s = ttl_s
        self._seen_of: dict[str, _Seen] = {}
        self._conflicts: set[str] = set()
        self._conflict_at: dict[str, float] = {}

    def on_read(self, files: Mapping[str, RankLoad], *, now: float, wall_ns: int) -> None:
        """Take in the readable files of one pass over the directory.

        A rank that is missing was perhaps only unreadable for a moment: it keeps its last content
        until the TTL ends.
        """
        for rank, content in files.items():
            if rank == self._own_rank:
                self._check_own(content, now)
            else:
                self._take(rank, content, now=now, wall_ns=wall_ns)
        for rank, seen in tuple(self._seen_of.items()):
            # A dead rank's file may lie there for long: it must be remembered as dead.
            if rank not in files and not self._is_live(seen, now):
                del self._seen_of[rank]

    def remote_load(self, now: float) -> dict[Key, RemoteLoad]:
        """The summed in-flight load of the living other ranks, by instance and incarnation."""
        total: dict[Key, RemoteLoad] = {}
        for seen in self._seen_of.values():
            if not self._is_live(seen, now):
                continue
            for entry in seen.content.load:
                key = (entry.instance_id, entry.incarnation)
                known = total.get(key)
                requests, tokens = (known.num_requests, known.num_tokens) if known else (0, 0)
                total[key] = RemoteLoad(
                    requests + max(0, entry.num_requests), tokens + max(0, entry.num_tokens)
                )
        return total

    def live_ranks(self, now: float) -> tuple[str, ...]:
        """The other ranks whose file still changes."""
        return tuple(sorted(r for r, seen in self._seen_of.items() if self._is_live(seen, now)))

    def skew_s(self) -> dict[str, float]:
        """How far each rank's wall clock was ahead of ours when its last change was seen.

        It includes the time between its write and our read, so small negative values are normal.
        """
        return {rank: seen.skew_s for rank, seen in self._seen_of.items()}

    def take_conflicts(self) -> frozenset[str]:
        """Ranks that two living writers claim; each once, until it has been well for a TTL."""
        conflicts, self._conflicts = frozenset(self._conflicts), set()
        return conflicts

    def _check_own(self, content: RankLoad, now: float) -> None:
        if content.writer != self._own_writer:
            self._note_conflict(self._own_rank, now)

    def _note_conflict(self, rank: str, now: float) -> None:
        last = self._conflict_at.get(rank)
        if last is None or now >= last + self._ttl_s:
            self._conflicts.add(rank)
        self._conflict_at[rank] = now

    def _take(self, rank: str, content: RankLoad, *, now: float, wall_ns: int) -> None:
        seen = self._seen_of.get(rank)
        if seen is None:
            seen = self._seen_of[rank] = _Seen(content, now)
        elif content.writer != seen.content.writer:
            # A restarted rank has a new writer; one that comes back never left.
            if content.writer in seen.former_writers:
                self._note_conflict(rank, now)
            seen.former_writers.add(seen.content.writer)
        elif content.sequence == seen.content.sequence:
            return
        seen.content = content
        seen.changed_at = now
        seen.skew_s = (content.written_at_ns - wall_ns) / 1e9

    def _is_live(self, seen: _Seen, now: float) -> bool:
        return now < seen.changed_at + self._ttl_s
