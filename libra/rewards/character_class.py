"""The quickstart's reward: write characters of the class that the prompt names."""

import string

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
    wanted = CLASSES.get(case.answer)
    if wanted is None:
        raise ValueError(f"the answer {case.answer!r} is none of {', '.join(CLASSES)}")
    text = case.response_text
    return sum(c in wanted for c in text[:length]) / max(length, len(text))
