"""What `validate` asks of parts above or beside it."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from libra.config.run import RunConfig
from libra.errors import DataError


class DatasetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The training data as the tokenizer sees it."""

    rows: int
    """Usable rows."""

    skipped_rows: int
    """Rows left out by on_bad_row: skip."""

    over_long_prompts: int
    """Prompts longer than max_model_len - max_new_tokens."""

    longest_prompt_tokens: int
    example_token_ids: tuple[int, ...]
    """The first prompt as the engine gets it, the chat template applied."""

    example_tokens: tuple[str, ...]
    """Text of each of `example_token_ids`."""


class RoleMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated memory of one device in one role."""

    role: str
    """`trainer rank` or `TP 2 engine worker`."""

    bytes_by_part: dict[str, int]
    """Weights, gradients, optimizer, activations, logits, KV cache."""

    limit_bytes: int | None
    """None where the device's memory is not known."""


class EvaluationDataError(DataError):
    """What is wrong is in eval_data."""


class SummarizeDataset(Protocol):
    def __call__(self, config: RunConfig, /) -> DatasetSummary:
        """Read data and tokenizer.

        Raises DataError naming file, line and column of rows that are bad or over-long, unless
        on_bad_row or on_long_prompt skip them; EvaluationDataError for those of eval_data.
        """
        ...


class EstimateMemory(Protocol):
    def __call__(self, config: RunConfig, /) -> Sequence[RoleMemory]:
        """Estimate each role's memory; empty when the model's shape is not known."""
        ...
