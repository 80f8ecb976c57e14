"""Numbers as people and models write them."""

import re
from collections import deque
from decimal import Decimal, DecimalException
from math import isfinite

import msgspec

_DIGITS = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d++)"
"""With or without commas between groups, of three digits or as in 12,34,567."""

_UNSIGNED = rf"(?:{_DIGITS}(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][+-]?\d{{1,4}}(?!\d))?"
# A minus behind an operand subtracts.
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}%])-)?"
    # A date is no fraction.
    rf"(?:(?<!/)(?<!/\ )(?P<top>{_UNSIGNED})\ ?/\ ?(?P<bottom>{_UNSIGNED})(?!\ ?/)"
    rf"|(?P<alone>{_UNSIGNED}))(?P<percent>\ ?\\?%)?"
)
_MINUS = "\u2212"


class Number(msgspec.Struct, frozen=True):
    """One number of a text."""

    value: Decimal
    """Without its percent sign."""

    is_percent: bool = False

    @property
    def meant(self) -> Decimal:
        return self.value / 100 if self.is_percent else self.value


def last_number(text: str) -> Number | None:
    """The last number in a text; None when it holds none."""
    found = deque(_NUMBER.finditer(text.replace(_MINUS, "-")), maxlen=1)
    return _number(found[0]) if found else None


def whole_number(text: str) -> Number | None:
    """The number that a text is, spaces around it aside; None when it is something else."""
    found = _NUMBER.fullmatch(text.replace(_MINUS, "-").strip().removeprefix("+"))
    return None if found is None else _number(found)


def is_same(one: Decimal, other: Decimal) -> bool:
    """Whole numbers are compared digit by digit, others as precisely as a float is."""
    if one == other:
        return True
    if _is_whole(one) and _is_whole(other):
        return False
    floats = float(one), float(other)
    return isfinite(floats[0]) and floats[0] == floats[1]


def _is_whole(number: Decimal) -> bool:
    return number == number.to_integral_value()


def _number(found: re.Match[str]) -> Number | None:
    try:
        value = (
            _decimal(found["alone"])
            if found["alone"]
            else _decimal(found["top"]) / _decimal(found["bottom"])
        )
    except DecimalException:
        # Divided by zero.
        return None
    return Number(value.copy_negate() if found["sign"] else value, found["percent"] is not None)


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))
