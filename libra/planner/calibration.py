"""Measured over predicted, per operation: what corrects the next plan.

A book belongs to one (hardware, model). Ratios are averaged as logarithms, so that twice too slow
and twice too fast cancel; the first observations count in full, later ones with weight
`_MEMORY`, and one observation moves a factor by at most `_LARGEST_STEP`.
"""

from math import exp, log
from typing import Literal, TypeAlias

import msgspec

from libra.errors import InvariantError

Operation: TypeAlias = Literal[
    "grpo_update",
    "recompute_logprobs",
    "rollout_decode",
    "rollout_prefill",
    "train_memory",
    "recompute_memory",
]
"""The first four are seconds; names of phases are those of the phase trace. The last two are bytes
beyond the static ones (parameters, gradients, optimizer state)."""

_MEMORY = 0.2
_LARGEST_STEP = log(4.0)


class Factor(msgspec.Struct, frozen=True, kw_only=True):
    """One operation's correction."""

    log_ratio: float = 0.0
    log_variance: float = 0.0
    num_observations: int = 0
    last_error_fraction: float = 0.0
    """Of the newest observation: measured / predicted - 1, the prediction corrected as it was."""

    @property
    def ratio(self) -> float:
        return exp(self.log_ratio)


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement beside the prediction that was made for it."""

    operation: Operation
    predicted: float
    """As planned, the factor of that time included."""

    measured: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Factors of one model on one kind of device."""

    hardware: str
    model: str
    factors: dict[Operation, Factor] = {}

    def ratio(self, operation: Operation) -> float:
        """1.0 until something was observed."""
        factor = self.factors.get(operation)
        return factor.ratio if factor else 1.0


def observe(calibration: Calibration, observation: Observation) -> Calibration:
    """The book with one more measurement.

    Raises InvariantError for a prediction or measurement that is not a positive, finite number.
    """
    predicted, measured = observation.predicted, observation.measured
    if not (0 < predicted < float("inf") and 0 < measured < float("inf")):
        raise InvariantError(
            f"{observation.operation}: predicted {predicted} and measured {measured} must both be "
            "positive and finite"
        )
    old = calibration.factors.get(observation.operation, Factor())
    error = log(measured / predicted)
    step = max(-_LARGEST_STEP, min(_LARGEST_STEP, error))
    weight = max(_MEMORY, 1 / (old.num_observations + 1))
    new = Factor(
        log_ratio=old.log_ratio + weight * step,
        log_variance=(1 - weight) * (old.log_variance + weight * step**2),
        num_observations=old.num_observations + 1,
        last_error_fraction=measured / predicted - 1,
    )
    return msgspec.structs.replace(
        calibration, factors={**calibration.factors, observation.operation: new}
    )


def encode(calibration: Calibration) -> bytes:
    return msgspec.json.encode(calibration)


def decode(content: bytes, *, hardware: str, model: str) -> Calibration:
    """The stored book, or an empty one when it belongs to another device or model.

    Raises msgspec.ValidationError or msgspec.DecodeError when the content is not a book.
    """
    book = msgspec.json.decode(content, type=Calibration)
    if (book.hardware, book.model) != (hardware, model):
        return Calibration(hardware=hardware, model=model)
    return book
