"""Measured over predicted, per operation: what corrects the next plan.

A book belongs to one (hardware, model). Ratios are averaged as logarithms, so that twice too slow
and twice too fast cancel. The first measurement is taken as it is: data sheets may be far off.
Later ones count for 1/2, 1/3, ... and never less than `_MEMORY`, and one of them is taken for at
most `_LARGEST_STEP` away: farther is an accident.
"""

from hashlib import sha256
from math import exp, inf, log
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from libra.config.hardware import HardwareConfig
from libra.config.model_arch import ModelArchConfig
from libra.errors import InvariantError

Operation: TypeAlias = Literal[
    "grpo_update",
    "recompute_logprobs",
    "rollout_decode",
    "rollout_prefill",
    "weight_export",
    "weight_sync",
    "train_memory",
    "recompute_memory",
]
"""The memory operations are bytes beyond the static ones (parameters, gradients, optimizer state);
all others are seconds. Names of phases are those of the phase trace."""

_MEMORY = 0.2
_LARGEST_STEP = log(4.0)
_FARTHEST: Final = log(1e6)
"""A factor beyond a million, either way, is no correction of a data sheet."""


class Factor(msgspec.Struct, frozen=True, kw_only=True):
    """One operation's correction. The bounds hold for a stored one."""

    log_ratio: Annotated[float, msgspec.Meta(ge=-_FARTHEST, le=_FARTHEST)] = 0.0
    log_variance: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    num_observations: Annotated[int, msgspec.Meta(ge=0)] = 0
    last_error_fraction: float = 0.0
    """Of the newest observation: measured / (factor before it x predicted) - 1."""

    @property
    def ratio(self) -> float:
        return exp(self.log_ratio)


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement beside the prediction that was made for it."""

    operation: Operation
    predicted: float
    """By the model alone, without any factor."""

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

    Raises InvariantError for a prediction or measurement that is not a positive, finite number. A
    measurement a million times off counts as a million.
    """
    predicted, measured = observation.predicted, observation.measured
    if not (0 < predicted < inf and 0 < measured < inf):
        raise InvariantError(
            f"{observation.operation}: predicted {predicted} and measured {measured} must both be "
            "positive and finite"
        )
    old = calibration.factors.get(observation.operation, Factor())
    seen = max(-_FARTHEST, min(_FARTHEST, log(measured) - log(predicted)))
    error = seen - old.log_ratio
    step = max(-_LARGEST_STEP, min(_LARGEST_STEP, error)) if old.num_observations else error
    weight = max(_MEMORY, 1 / (old.num_observations + 1))
    new = Factor(
        log_ratio=old.log_ratio + weight * step,
        log_variance=(1 - weight) * (old.log_variance + weight * step**2),
        num_observations=old.num_observations + 1,
        last_error_fraction=exp(error) - 1,
    )
    return msgspec.structs.replace(
        calibration, factors={**calibration.factors, observation.operation: new}
    )


def book_of(hardware: HardwareConfig, arch: ModelArchConfig) -> Calibration:
    """The empty book of this device and model."""
    return Calibration(hardware=hardware.device_name, model=model_key(arch))


def model_key(arch: ModelArchConfig) -> str:
    """`Qwen3ForCausalLM-40x5120-1f2e3d4c`: two models of one class are two models."""
    digest = sha256(msgspec.json.encode(arch, order="sorted")).hexdigest()[:8]
    return f"{arch.architecture}-{arch.num_layers}x{arch.hidden_size}-{digest}"


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
