"""Prompts, workflow and reward."""

from typing import Any, Literal

from libra.config.base import Config, PositiveCount, Seconds


class DataConfig(Config, frozen=True, kw_only=True):
    """Flat keys of the dataset, the workflow that turns a row into a trajectory, the reward."""

    train_data: str = ""
    """Path of the training prompts (.jsonl, .jsonl.gz, .parquet or a dataset directory)."""

    eval_data: str = ""
    shuffle: bool = True
    """Shuffle rows each epoch with a permutation of (seed, epoch)."""

    prompt_field: str = "prompt"
    """Field with a string or a list of chat messages."""

    answer_field: str = "answer"
    apply_chat_template: bool = True
    """Render string prompts as one user message through the tokenizer's chat template."""

    on_bad_row: Literal["fail", "skip"] = "fail"
    on_long_prompt: Literal["fail", "skip"] = "fail"
    """Prompts longer than max_model_len - max_new_tokens are never cut."""

    workflow: str = "single_turn"
    """A built-in workflow's name or `module:function`."""

    workflow_args: dict[str, Any] = {}
    reward: str = "exact_match"
    """A built-in reward's name or `module:function`."""

    reward_args: dict[str, Any] = {}
    reward_workers: PositiveCount | None = None
    """Reward processes; null means one per core."""

    reward_timeout_s: Seconds = 10.0
    reward_memory_bytes: PositiveCount = 4 * 2**30
    max_group_attempts: PositiveCount = 3
    """Tries of a prompt group before the prompt is quarantined."""
