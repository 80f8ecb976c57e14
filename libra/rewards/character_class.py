"""The quickstart's reward: write characters of the class that the prompt names."""

import string
from typing import Any

from libra.rewards.case import RewardCase

CLASSES = {
    "digits": frozenset(string.digits),
    "capitals": frozenset(string.ascii_uppercase),
    "letters": frozenset(string.ascii_lowercase),
    "symbols": frozenset(string.punctuation),
}


def character_class(case: RewardCase, *, length: int = 8) -> float:
    """Share of `length` wanted characters that are there and of the class `case.answer`.

    Characters beyond `length` earn nothing and lower the share, as missing ones do: only exactly
    `length` characters, all of the class, score 1.
    """
    check_class(case.answer)
    wanted, text = CLASSES[case.answer], case.response_text
    return sum(c in wanted for c in text[:length]) / max(length, len(text))


def check_class(answer: Any) -> None:
    """Raise ValueError for an answer that names no class."""
    if not isinstance(answer, str) or answer not in CLASSES:
        raise ValueError(f"the answer {answer!r:.60} is none of {', '.join(CLASSES)}")
