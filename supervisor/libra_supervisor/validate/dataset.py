"""The training data in numbers, and one prompt as tokens."""

from pathlib import Path

from tokenizers import Tokenizer

from libra.data.dataset import PromptDataset
from libra_supervisor.validate.ports import DatasetSummary


def summary_of(dataset: PromptDataset, *, tokenizer_directory: Path) -> DatasetSummary:
    """Count rows and tokens of a data set that was read, and so tokenised, before.

    Tokens are shown one by one, the special ones too.
    """
    rows = [int(row) for row in dataset.rows]
    example = dataset.task(rows[0]).prompt_token_ids
    # The run's own tokenizer leaves special tokens out of text.
    tokenizer = Tokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
    return DatasetSummary(
        rows=len(rows),
        skipped_rows=len(dataset.bad_rows),
        over_long_prompts=len(dataset.long_rows),
        longest_prompt_tokens=max(len(dataset.task(row).prompt_token_ids) for row in rows),
        example_token_ids=example,
        example_tokens=tuple(
            tokenizer.decode([token_id], skip_special_tokens=False) for token_id in example
        ),
    )
