"""The base of every section and the value types that carry ranges."""

from typing import Annotated, Final

import msgspec

PATH: Final = "path"
INFINITY: Final = "infinity"
"""Marks in `msgspec.Meta.extra`: what `libra.config.typed` does with the value beyond its range."""

Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
DecayRate = Annotated[float, msgspec.Meta(ge=0, lt=1)]
"""Weight of the past in a running mean; 1 would never move."""

Multiplier = Annotated[float, msgspec.Meta(ge=0, le=1000)]
Margin = Annotated[float, msgspec.Meta(ge=1)]
Gibibytes = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
"""More would overflow where sizes are whole numbers of bytes."""

LogSpread = Annotated[float, msgspec.Meta(ge=0, le=10)]
"""Standard deviation of a natural logarithm; 10 spreads over nine orders of magnitude."""

Rate = Annotated[float, msgspec.Meta(ge=1)]
"""Per second; less than one of anything takes longer than a float can say."""

GrowthFactor = Annotated[float, msgspec.Meta(ge=1)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
PositiveFraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Bound = Annotated[float, msgspec.Meta(ge=0, extra={INFINITY: True})]
"""At least 0; `.inf` removes the bound. Every other number must be finite."""

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
PathText = Annotated[str, msgspec.Meta(extra={PATH: True})]
"""A path, absolute once loaded: relative ones are taken from the directory of the file that says
them (an override's or environment variable's from the working directory), `~/` from HOME."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section. Ranges are checked by `msgspec.convert`, not by the constructor."""
