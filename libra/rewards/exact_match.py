"""Rewards that compare the response with the row's answer."""

import re

from libra.errors import ConfigError
from libra.rewards.case import RewardCase

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


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
    match scores 0.
    """
    found = case.response_text
    if pattern:
        matches = re.findall(pattern, found)
        if not matches:
            return 0.0
        found = matches[-1]
    found, expected = found.strip(), str(case.answer).strip()
    if ignore_case:
        found, expected = found.casefold(), expected.casefold()
    return float(found == expected)


def number_match(case: RewardCase) -> float:
    """1 when the last number in the response equals the answer as a number; else 0.

    Raises ValueError when the answer is not a number.
    """
    expected = float(str(case.answer).replace(",", ""))
    numbers = _NUMBER.findall(case.response_text)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == expected)
