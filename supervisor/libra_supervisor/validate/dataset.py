"""The training data as `validate --data` reads it: all of it, once, as a run would."""

from functools import partial
from pathlib import Path

from libra.config.run import RunConfig
from libra.data.dataset import PromptDataset, PromptRules
from libra.data.formats import open_source
from libra.data.task import PromptFields
from libra.data.tokenizer import PromptTokenizer
from libra.errors import DataError
from libra.rewards.loading import answer_error
from libra.workflows.loading import BUILT_IN as WORKFLOWS
from libra.workflows.loading import check_tokenizer, load_workflow, tools_shown
from libra_supervisor.validate.ports import DatasetSummary, EvaluationDataError


def open_dataset(config: RunConfig, path: str) -> PromptDataset:
    """Read and tokenise every row at `path`, as a run does.

    Raises DataError, and ConfigError for a workflow that cannot be used.
    """
    data, rollout = config.data, config.rollout
    load_workflow(data.workflow, data.workflow_args)
    tokenizer = PromptTokenizer(Path(config.model.resolved_tokenizer_path))
    check_tokenizer(data.workflow, tokenizer)
    return PromptDataset(
        open_source(Path(path)),
        tokenizer,
        fields=PromptFields(
            prompt=data.prompt_field,
            answer=data.answer_field,
            apply_chat_template=data.apply_chat_template,
            tools=tools_shown(data.workflow, data.workflow_args),
        ),
        rules=PromptRules(
            max_prompt_tokens=rollout.max_model_len - rollout.max_new_tokens,
            on_bad_row=data.on_bad_row,
            on_long_prompt=data.on_long_prompt,
        ),
        # A workflow of the user's own may score its trajectories itself.
        answer_error=partial(answer_error, data.reward if data.workflow in WORKFLOWS else ""),
    )


def summarize_dataset(config: RunConfig) -> DatasetSummary:
    """Read and tokenise every row of all data. Raises DataError as the port says."""
    dataset = open_dataset(config, config.data.train_data)
    if config.data.eval_data:
        try:
            open_dataset(config, config.data.eval_data)
        except DataError as error:
            raise EvaluationDataError(str(error)) from error
    rows = [int(row) for row in dataset.rows]
    example = dataset.task(rows[0]).prompt_token_ids
    return DatasetSummary(
        rows=len(rows),
        skipped_rows=len(dataset.bad_rows),
        over_long_prompts=len(dataset.long_rows),
        longest_prompt_tokens=max(len(dataset.task(row).prompt_token_ids) for row in rows),
        example_token_ids=example,
        example_tokens=dataset.tokenizer.spelled(example),
    )
