"""Appends to the run directory's records. Blocks: call it in a thread."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from libra.errors import SiteError
from libra.rollouts.group import CompleteGroup
from libra.rollouts.trajectory import Trajectory
from libra.storage.atomic import write_record
from libra_supervisor.records.evaluation import EvaluationRecord
from libra_supervisor.records.reconfiguration import Line
from libra_supervisor.records.reload import ReloadRecord, StrayAck
from libra_supervisor.records.step import StepRecord
from libra_supervisor.records.trackers import Trackers
from libra_supervisor.run_directory import RunDirectory


class TrajectoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of trajectories/step_NNNNNN.jsonl."""

    trajectory_id: str
    prompt_id: str
    sample_index: int
    reward: float | None
    finish_reason: str
    num_turns: int
    num_prompt_tokens: int
    num_response_tokens: int
    oldest_version: int
    version_spans: tuple[tuple[int, int, int], ...]
    """(version, start, end) over positions of `token_ids`."""

    instance_ids: tuple[str, ...]
    response_text: str
    token_ids: tuple[int, ...]


class RecordsWriter:
    """One writer per run directory."""

    def __init__(self, directory: RunDirectory, trackers: Trackers | None = None) -> None:
        self._directory = directory
        self._trackers = trackers or Trackers()

    def write_step(self, record: StepRecord, groups: Sequence[CompleteGroup]) -> None:
        """Trajectories first, so that a step in metrics.jsonl always has its trajectories.

        This and the others raise SiteError where the disk takes no more.
        """
        lines = _trajectory_lines(t for group in groups for t in group.trajectories)
        write_record(self._directory.trajectories_of(record.step), lines)
        append_line(self._directory.metrics, msgspec.json.encode(record))
        self._trackers.offer(record)

    def write_evaluation(
        self, record: EvaluationRecord, trajectories: Sequence[Trajectory]
    ) -> None:
        """Trajectories first, as for a step."""
        write_record(
            self._directory.evaluated_of(record.policy_version), _trajectory_lines(trajectories)
        )
        append_line(self._directory.evaluations, msgspec.json.encode(record))

    def write_reload(self, record: ReloadRecord | StrayAck) -> None:
        append_line(self._directory.reloads, msgspec.json.encode(record))

    def write_reconfiguration(self, line: Line) -> None:
        append_line(self._directory.reconfigurations, msgspec.json.encode(line))


def append_line(path: Path, line: bytes) -> None:
    """Append one line, in one write where the disk takes it; a torn last line is closed first.

    Raises SiteError where it does not take it.
    """
    try:
        _append_line(path, line)
    except OSError as error:
        raise SiteError(f"{path} cannot be written: {error.strerror}") from error


def _append_line(path: Path, line: bytes) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        left = memoryview((b"\n" if is_torn else b"") + line + b"\n")
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def _trajectory_lines(trajectories: Iterable[Trajectory]) -> bytes:
    return b"".join(msgspec.json.encode(_trajectory_record(t)) + b"\n" for t in trajectories)


def _trajectory_record(trajectory: Trajectory) -> TrajectoryRecord:
    return TrajectoryRecord(
        trajectory_id=trajectory.trajectory_id,
        prompt_id=trajectory.prompt_id,
        sample_index=trajectory.sample_index,
        reward=trajectory.reward,
        finish_reason=trajectory.finish_reason,
        num_turns=trajectory.num_turns,
        num_prompt_tokens=trajectory.num_prompt_tokens,
        num_response_tokens=trajectory.num_response_tokens,
        oldest_version=trajectory.oldest_version,
        version_spans=tuple(
            (span.policy_version, span.start, span.end) for span in trajectory.version_spans
        ),
        instance_ids=trajectory.instance_ids,
        response_text=trajectory.response_text,
        token_ids=trajectory.token_ids,
    )
