"""What hybrid replicas need of a backend beyond training."""

from typing import Protocol

from libra.trainer.backend import TrainBackend
from libra.trainer.hybrid_gradients import GradientView
from libra.trainer.model import GradientSeam


class HybridBackend(TrainBackend, Protocol):
    """A backend whose gradients can be added to from outside."""

    seam: GradientSeam
    gradients: GradientView

    def step_with(self, norm: float, *, learning_rate: float) -> None:
        """Clip as if the global norm were `norm`, and step."""
