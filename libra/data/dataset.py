"""The prompts of one run: every row looked at before the first one is used."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from libra.data.source import BadRow, RowSource
from libra.data.task import PromptFields, RowRefusedError, Task, task_of
from libra.data.tokenizer import PromptTokenizer
from libra.errors import DataError
from libra.ids import PromptId

_NUM_SHOWN = 10
"""Bad rows an error names one by one."""


class PromptRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows are used."""

    max_prompt_tokens: int
    """max_model_len - max_new_tokens: a longer prompt leaves no room for an answer."""

    on_bad_row: Literal["fail", "skip"] = "fail"
    on_long_prompt: Literal["fail", "skip"] = "fail"


class PromptDataset:
    """Usable rows of a source, as tasks."""

    def __init__(
        self,
        source: RowSource,
        tokenizer: PromptTokenizer,
        *,
        fields: PromptFields,
        rules: PromptRules,
        answer_error: Callable[[Any], str | None] = lambda _answer: None,
    ) -> None:
        """Reads and tokenises every row once: run it in a thread.

        A row is bad, too, when `answer_error` has something to say of its answer.
        Raises DataError that names the rows that are bad or too long, unless they are skipped by
        the rules, and when no row is left.
        """
        self._source = source
        self.tokenizer = tokenizer
        self._fields = fields
        self._answer_error = answer_error
        self.bad_rows: tuple[BadRow, ...]
        self.long_rows: tuple[BadRow, ...]
        usable, bad, too_long = self._inspect(rules.max_prompt_tokens)
        if rules.on_bad_row == "fail" and bad:
            raise _refusal("cannot be used", bad, "on_bad_row")
        if rules.on_long_prompt == "fail" and too_long:
            raise _refusal("are too long", too_long, "on_long_prompt")
        if not usable:
            raise DataError(_why_empty(source, bad, too_long))
        self.bad_rows = tuple(bad)
        self.long_rows = tuple(too_long)
        self.rows = np.array(usable, dtype=np.int64)
        """Indices of the usable rows, ascending."""

    @property
    def fingerprint(self) -> str:
        """Changes with the content of the data and with which of its rows are used."""
        used = xxhash.xxh3_64_hexdigest(self.rows.astype("<i8").tobytes())
        return f"{self._source.fingerprint}-{len(self.rows)}-{used}"

    def __len__(self) -> int:
        return len(self.rows)

    def task(self, row: int) -> Task:
        """The task of a usable row, read and tokenised again."""
        result = self._task_or_bad(row)
        if isinstance(result, BadRow):
            raise DataError(
                f"{result.location}: {result.reason}; the file changed while the run was using it"
            )
        return result

    def _inspect(self, max_prompt_tokens: int) -> tuple[list[int], list[BadRow], list[BadRow]]:
        usable: list[int] = []
        bad: list[BadRow] = []
        too_long: list[BadRow] = []
        for row in range(len(self._source)):
            result = self._task_or_bad(row)
            if isinstance(result, BadRow):
                bad.append(result)
            elif len(result.prompt_token_ids) > max_prompt_tokens:
                tools = ", tools included" if self._fields.tools and result.messages else ""
                num_tokens = len(result.prompt_token_ids)
                reason = f"{num_tokens} tokens{tools}, the most is {max_prompt_tokens}"
                too_long.append(BadRow(self._source.location(row), reason))
            else:
                usable.append(row)
        return usable, bad, too_long

    def _task_or_bad(self, row: int) -> Task | BadRow:
        record = self._source.record(row)
        if isinstance(record, BadRow):
            return record
        prompt_id = PromptId(f"row-{row}")
        try:
            task = task_of(record, prompt_id, fields=self._fields, tokenizer=self.tokenizer)
        except RowRefusedError as error:
            return BadRow(self._source.location(row), str(error))
        reason = self._answer_error(task.answer)
        return task if reason is None else BadRow(self._source.location(row), reason)


def _refusal(what: str, rows: Sequence[BadRow], option: str) -> DataError:
    lines = [f"{row.location}: {row.reason}" for row in rows[:_NUM_SHOWN]]
    if len(rows) > _NUM_SHOWN:
        lines.append(f"and {len(rows) - _NUM_SHOWN} more")
    listed = "\n  ".join(lines)
    return DataError(
        f"{len(rows)} rows {what} (fix them, or leave them out with {option}: skip):\n  {listed}"
    )


def _why_empty(source: RowSource, bad: Sequence[BadRow], too_long: Sequence[BadRow]) -> str:
    if not len(source):
        return "the data holds no rows"
    return f"no row is left to train on: {len(bad)} are bad, {len(too_long)} are too long"
