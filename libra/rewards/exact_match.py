"""Rewards that compare the response with the row's answer."""

import json
import re
from typing import Any

from libra.errors import ConfigError
from libra.rewards.case import RewardCase
from libra.rewards.numbers import Number, is_same, last_number, whole_number


def check_exact_match(*, ignore_case: bool = False, pattern: str = "") -> None:  # noqa: ARG001
    """Raise ConfigError for a pattern with which no response could be scored."""
    try:
        num_groups = re.compile(pattern).groups
    except (re.error, TypeError) as error:
        raise ConfigError(f"reward_args: pattern {pattern!r}: {error}") from error
    if num_groups > 1:
        raise ConfigError(f"reward_args: pattern {pattern!r} has {num_groups} groups, not one")


def exact_match(case: RewardCase, *, ignore_case: bool = False, pattern: str = "") -> float:
    """1 when the response is the answer, spaces around both aside; else 0.

    With `pattern`, a regular expression with one group, what its last match found is compared; no
    match scores 0. Raises ValueError when the answer is null.
    """
    spellings = _spellings(case.answer)
    found = case.response_text
    if pattern:
        matches = re.findall(pattern, found)
        if not matches:
            return 0.0
        found = matches[-1]
    found = found.strip()
    if ignore_case:
        return float(found.casefold() in {spelling.casefold() for spelling in spellings})
    return float(found in spellings)


def check_text_answer(answer: Any) -> None:
    """Raise ValueError for what `exact_match` cannot compare with."""
    _spellings(answer)


def number_match(case: RewardCase) -> float:
    """1 when the last number in the response equals the answer as a number; else 0.

    Fractions and percentages are the numbers they stand for. Where the answer has no percent sign,
    one in the response may also be its unit. Raises ValueError when the answer is not a number.
    """
    expected = _expected(case.answer)
    found = last_number(case.response_text)
    if found is None:
        return 0.0
    is_unit = found.is_percent and not expected.is_percent
    return float(
        is_same(found.meant, expected.meant) or (is_unit and is_same(found.value, expected.value))
    )


def check_number_answer(answer: Any) -> None:
    """Raise ValueError for what `number_match` cannot compare with."""
    _expected(answer)


def _expected(answer: Any) -> Number:
    number = None if answer is None or isinstance(answer, bool) else whole_number(str(answer))
    if number is None:
        raise ValueError(f"the answer {answer!r:.60} is not a number")
    return number


def _spellings(answer: Any) -> set[str]:
    """How a response may write the answer."""
    match answer:
        case None:
            raise ValueError("the answer is null; there is nothing to compare with")
        case str():
            return {answer.strip()}
        case float() if answer.is_integer():
            # Columns of whole numbers with gaps come as floats.
            return {str(answer), str(int(answer))}
        case _:
            # As Python and as JSON write it: True and true.
            return {str(answer).strip(), json.dumps(answer, ensure_ascii=False, default=str)}
