"""Mathematical equality of final answers, with math-verify (extra `math`)."""

from typing import Any

from libra.errors import SiteError
from libra.rewards.case import RewardCase


def require_math_verify() -> tuple[Any, Any]:
    """Its `parse` and `verify`. Raises SiteError when it is not installed."""
    try:
        from math_verify import parse, verify  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise SiteError(
            "the reward math needs the package math-verify: pip install 'libra-rl[math]'"
        ) from error
    return parse, verify


def check_formula(answer: Any) -> None:
    """Raise ValueError for an answer in which there can be no formula; reads none."""
    if answer is None or not str(answer).strip():
        raise ValueError(f"math-verify cannot read the answer {answer!r:.60}")


def math(case: RewardCase) -> float:
    """1 when the response's final answer equals `case.answer`, in whatever form; else 0.

    Needs no time limit of its own: sympy may hang, and the worker is then killed from outside.
    """
    parse, verify = require_math_verify()
    check_formula(case.answer)
    expected = str(case.answer)
    # The gold answer is usually bare; math-verify only looks inside LaTeX or plain expressions.
    gold = parse(expected if "$" in expected else f"${expected}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot read the answer {expected!r:.60}")
    found = parse(case.response_text, parsing_timeout=None)
    return float(verify(gold, found, timeout_seconds=None))
