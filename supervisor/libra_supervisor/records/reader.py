"""Reads back what an earlier supervisor of the same run wrote down."""

import os
from pathlib import Path
from typing import Annotated

import msgspec

from libra.errors import DataError
from libra_supervisor.records.evaluation import EvaluationRecord
from libra_supervisor.run_directory import RunDirectory

TAIL_BYTES = 256 * 1024


MOST_OBSERVED = 16384
"""Newest trajectories whose lengths say what the next ones will be like."""


class _Lengths(msgspec.Struct):
    num_response_tokens: Annotated[int, msgspec.Meta(ge=0)]
    token_ids: list[int]

    def __post_init__(self) -> None:
        if self.num_response_tokens > len(self.token_ids):
            raise ValueError(
                f"num_response_tokens is {self.num_response_tokens} of {len(self.token_ids)} tokens"
            )


def observed_lengths(directory: RunDirectory) -> tuple[tuple[int, int], ...]:
    """(tokens given, tokens sampled) of the newest trajectories of a run, newest step first.

    Raises DataError when the run has recorded none, or a line is not a trajectory.
    """
    found: list[tuple[int, int]] = []
    for path in sorted(directory.trajectories.glob("step_*.jsonl"), reverse=True):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            found.append(_lengths(path, number, line))
        if len(found) >= MOST_OBSERVED:
            break
    if not found:
        raise DataError(f"{directory.root} has no trajectories yet: is it a run directory?")
    return tuple(found[:MOST_OBSERVED])


def _lengths(path: Path, number: int, line: bytes) -> tuple[int, int]:
    try:
        one = msgspec.json.decode(line, type=_Lengths)
    except msgspec.DecodeError as error:
        raise DataError(f"{path}:{number}: not a trajectory: {error}") from error
    return len(one.token_ids) - one.num_response_tokens, one.num_response_tokens


def last_evaluation(evaluations: Path) -> EvaluationRecord:
    """The newest line of evaluations.jsonl. Raises DataError when there is none."""
    try:
        *_, last = evaluations.read_bytes().splitlines()
        return msgspec.json.decode(last, type=EvaluationRecord)
    except (OSError, ValueError) as error:
        raise DataError(f"{evaluations}: no evaluation is recorded there: {error}") from error


class _Line(msgspec.Struct):
    attempt: int


def last_attempt(metrics: Path) -> int:
    """The highest attempt among the last lines of metrics.jsonl; 0 when there are none."""
    attempts = (_attempt_of(line) for line in _last_lines(metrics))
    return max((attempt for attempt in attempts if attempt), default=0)


def _last_lines(path: Path) -> list[bytes]:
    """Of the file's end; empty when there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().splitlines()
    except FileNotFoundError:
        return []


class _Decision(msgspec.Struct):
    decision_id: int


def last_decision_id(reconfigurations: Path) -> int:
    """The highest id among the last lines of reconfigurations.jsonl; 0 when there are none."""
    found = 0
    for line in _last_lines(reconfigurations):
        try:
            found = max(found, msgspec.json.decode(line, type=_Decision).decision_id)
        except msgspec.DecodeError:
            continue  # torn by a crash, or the first of the tail
    return found


def _attempt_of(line: bytes) -> int:
    try:
        return msgspec.json.decode(line, type=_Line).attempt
    except msgspec.DecodeError:
        # Torn by a crash, or the first of the tail.
        return 0
