"""What the training step, the export and the checkpoints need of a model, whoever runs it.

A backend is one rank's part of a model with its optimizer. Every method is called by all ranks of
the world in the same order. Which one is built is decided in `libra.trainer.assembly`.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from libra.trainer.batch import Arrangement, MicroBatch
from libra.trainer.head import Sampling
from libra.trainer.loss import LossSums

Loss: TypeAlias = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, LossSums]]
"""float32[2, n] logprobs and entropies of a micro-batch -> its share of the loss, and sums."""

Beat: TypeAlias = Callable[[], None]
"""Called at every micro-batch or parameter: the rank is alive."""


class HfTensor(NamedTuple):
    """A tensor of the model's Hugging Face files."""

    name: str
    shape: tuple[int, ...]


class Scorer(Protocol):
    """A model that is not trained."""

    def logprobs(
        self, batches: Sequence[MicroBatch], *, sampling: Sampling, beat: Beat
    ) -> list[torch.Tensor]:
        """Score without gradients: float32[n] per micro-batch where `has_results`, else nothing."""


class StagedState(Protocol):
    """One rank's part of a checkpoint, in host memory. Its methods may run in any thread."""

    def write(self, *, is_durable: bool) -> list[Any]:
        """Write this rank's files; returns what `finish` wants of every rank. Raises OSError.

        `is_durable`: they outlast a power cut.
        """

    def finish(self, results: list[list[Any]]) -> None:
        """On rank 0, when every rank has written: what only the whole can say. Raises OSError."""


class TrainBackend(Scorer, Protocol):
    """A model being trained."""

    name: str
    """As in `train_backend`."""

    vocab_size: int
    model_hash: str
    """Equal for two models whose checkpoints can be exchanged."""

    has_tied_embeddings: bool
    arrangement: Arrangement
    reference: Scorer | None
    """The KL reference; None without a KL term."""

    reference_hash: str | None
    """Of the files that the KL reference was loaded from."""

    passes_in_step: bool
    """Whether every rank must run as many micro-batches as the others."""

    has_distributed_optimizer: bool

    @property
    def num_parameters(self) -> int:
        """On this rank."""

    @property
    def export_dtype(self) -> torch.dtype: ...

    @property
    def export_plan(self) -> Sequence[HfTensor]:
        """Every tensor that `hf_tensors` yields, in its order."""

    def seed(self, seed: int, step: int) -> None:
        """Make all chance of one training step a function of the run's seed and the step.

        So a resumed step draws what it drew before, without stored generator states.
        """

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss: Loss, *, sampling: Sampling, beat: Beat
    ) -> list[LossSums]:
        """Set the gradients to those of the losses summed over all micro-batches and ranks.

        Returns the sums of each micro-batch where `has_results`, else nothing.
        """

    def step_if_finite(self, *, learning_rate: float) -> tuple[float, bool]:
        """Clip by the global norm and step; returns that norm and whether the step was taken.

        A norm that is NaN or infinite leaves weights and optimizer state untouched, on every rank.
        """

    def has_finite_weights(self) -> bool:
        """Whether every value that this rank holds is finite."""

    def hf_tensors(self, *, beat: Beat, to_cpu: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of the whole model on rank 0; nothing elsewhere.

        On the CPU, or without `to_cpu` where the model is. Every rank must run it to the end, and
        calls `beat` before every parameter.
        """

    def prepare_to_stage(self) -> None:
        """Have memory for what `stage` takes ready on the host, beside what goes on."""

    def stage(self, directory: Path) -> StagedState:
        """Take the state of model and optimizer as it is now, to be written to `directory`."""

    def restore(self, directory: Path) -> None:
        """Load what `stage` took. Raises DataError when it does not fit."""

    def restore_weights(self, directory: Path) -> None:
        """Load the model alone of what `stage` took: enough to score and to export."""
