"""The completions that are being answered, and how far each has come in the engine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from libra.serving.answer_record import CURRENT_ANSWER, AnswerRecord


class OpenAnswers:
    """Records of HTTP requests in progress, by their X-Request-Id."""

    def __init__(self) -> None:
        self._name_of: dict[AnswerRecord, str] = {}

    @contextmanager
    def answering(self, name: str) -> Iterator[AnswerRecord]:
        """The record of a request that is answered within the block; unnamed ones are not told."""
        record = AnswerRecord()
        self._name_of[record] = name
        reset = CURRENT_ANSWER.set(record)
        try:
            yield record
        finally:
            CURRENT_ANSWER.reset(reset)
            del self._name_of[record]

    def progress(self, num_tokens_of: Mapping[str, int] | None) -> dict[str, int]:
        """Answer tokens by name, given the engine's counts.

        None: the engine cannot be asked while it loads weights, and loses nothing meanwhile, so
        what was last seen holds. A request whose every part is missing in the engine has finished
        or was lost: it is left out, and so shows no sign of life.
        """
        found: dict[str, int] = {}
        for record, name in self._name_of.items():
            if name and (num_tokens_of is None or _is_known(record, num_tokens_of)):
                if num_tokens_of is not None:
                    record.num_tokens_seen = _num_tokens(record, num_tokens_of)
                found[name] = record.num_tokens_seen
        return found


def _is_known(record: AnswerRecord, num_tokens_of: Mapping[str, int]) -> bool:
    """Tell whether the engine has a part of it, or has not been handed it yet."""
    ids = _engine_ids(record)
    return not ids or any(engine_id in num_tokens_of for engine_id in ids)


def _num_tokens(record: AnswerRecord, num_tokens_of: Mapping[str, int]) -> int:
    return sum(num_tokens_of.get(engine_id, 0) for engine_id in _engine_ids(record))


def _engine_ids(record: AnswerRecord) -> tuple[str, ...]:
    return tuple(engine_id for request in record.requests for engine_id in request.engine_ids)
