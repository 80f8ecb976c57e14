"""The data of a run: tokenizer, tasks, cursor, and the probe that engines and trainer are asked."""

from pathlib import Path

import msgspec

from libra.config.arithmetic import batch_equation
from libra.config.run import RunConfig
from libra.data.cursor import Cursor, visits_of_epochs
from libra.data.dataset import PromptDataset, PromptRules
from libra.data.formats import open_source
from libra.data.task import PromptFields
from libra.data.tokenizer import PromptTokenizer

PROBE_TOKENS = 48
MIN_PROBE_TOKENS = 2


class Prompts(msgspec.Struct, frozen=True):
    """What the data gives to a run."""

    tokenizer: PromptTokenizer
    dataset: PromptDataset
    cursor: Cursor
    probe_token_ids: tuple[int, ...]


def open_prompts(config: RunConfig) -> Prompts:
    """Read and check every row. Blocks: call it in a thread. Raises DataError."""
    data, rollout = config.data, config.rollout
    tokenizer = PromptTokenizer(Path(config.model.resolved_tokenizer_path))
    dataset = PromptDataset(
        open_source(Path(data.train_data)),
        tokenizer,
        fields=PromptFields(
            prompt=data.prompt_field,
            answer=data.answer_field,
            apply_chat_template=data.apply_chat_template,
        ),
        rules=PromptRules(
            max_prompt_tokens=rollout.max_model_len - rollout.max_new_tokens,
            on_bad_row=data.on_bad_row,
            on_long_prompt=data.on_long_prompt,
        ),
    )
    epochs = config.control.epochs
    max_visits = None
    if epochs is not None:
        max_visits = visits_of_epochs(
            num_prompts=len(dataset), epochs=epochs, prompts_per_step=batch_equation(config).prompts
        )
    cursor = Cursor(
        dataset.rows,
        fingerprint=dataset.fingerprint,
        seed=config.control.seed,
        shuffle=data.shuffle,
        max_visits=max_visits,
    )
    return Prompts(tokenizer, dataset, cursor, probe_of(dataset, rollout.max_model_len))


def probe_of(dataset: PromptDataset, max_model_len: int) -> tuple[int, ...]:
    """Token ids whose logprobs engine and trainer compare after every reload: the first prompts."""
    wanted = min(PROBE_TOKENS, max_model_len - 1)
    tokens: list[int] = []
    for row in dataset.rows:
        tokens += dataset.task(int(row)).prompt_token_ids
        if len(tokens) >= wanted:
            break
    # A data set of one short prompt is repeated: the probe needs at least one prediction.
    while len(tokens) < MIN_PROBE_TOKENS:
        tokens += tokens
    return tuple(tokens[:wanted])
