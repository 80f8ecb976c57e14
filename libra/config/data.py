"""Prompts, workflow and reward."""

from typing import Any, Literal

from libra.config.base import Config, PathText, PositiveCount, Seconds

CODE_TIMEOUT_S = 6.0
"""Of the built-in reward `code`, for all tests of a row together."""


class DataConfig(Config, frozen=True, kw_only=True):
    """Flat keys of the dataset, the workflow that turns a row into a trajectory, the reward."""

    train_data: PathText = ""
    """Path of the training prompts (.jsonl, .jsonl.gz, .parquet or a dataset directory)."""

    eval_data: PathText = ""
    """Path of the prompts for evaluation, in the same formats; empty evaluates nothing."""

    shuffle: bool = True
    """Shuffle rows each epoch with a permutation of (seed, epoch)."""

    prompt_field: str = "prompt"
    """Field with a string or a list of chat messages."""

    answer_field: str = "answer"
    """Field that the reward compares with; '' when rows have none."""

    apply_chat_template: bool = True
    """Render string prompts as one user message through the tokenizer's chat template."""

    on_bad_row: Literal["fail", "skip"] = "fail"
    """What a row that cannot be used does: stop the start, or be counted and left out."""

    on_long_prompt: Literal["fail", "skip"] = "fail"
    """What a prompt longer than max_model_len - max_new_tokens does; it is never cut."""

    workflow: str = "single_turn"
    """A built-in workflow's name or `module:function`."""

    workflow_args: dict[str, Any] = {}
    """Keyword arguments of the workflow."""

    reward: str = "exact_match"
    """A built-in reward's name or `module:function`."""

    reward_args: dict[str, Any] = {}
    """Keyword arguments of the reward."""

    reward_workers: PositiveCount | None = None
    """Reward processes; null means one per core."""

    reward_timeout_s: Seconds = 10.0
    """Seconds after which a reward call is killed and its sample fails."""

    reward_memory_bytes: PositiveCount = 4 * 2**30
    """Address space of one reward process in bytes."""

    max_group_attempts: PositiveCount = 3
    """Tries of a prompt group before the prompt is quarantined; failures of engines do not count,
    up to ten times as many tries."""
