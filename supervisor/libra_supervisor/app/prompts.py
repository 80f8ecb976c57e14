"""The data of a run: tokenizer, tasks, cursor, and the probe that engines and trainer are asked."""

import msgspec

from libra.config.arithmetic import batch_equation
from libra.config.run import RunConfig
from libra.data.cursor import Cursor, visits_of_epochs
from libra.data.dataset import PromptDataset
from libra.data.tokenizer import PromptTokenizer
from libra_supervisor.validate.dataset import open_dataset

PROBE_TOKENS = 48
MIN_PROBE_TOKENS = 2


class Prompts(msgspec.Struct, frozen=True):
    """What the data gives to a run."""

    tokenizer: PromptTokenizer
    dataset: PromptDataset
    cursor: Cursor
    probe_token_ids: tuple[int, ...]
    evaluated: PromptDataset | None
    """The data of evaluations; None without."""


def open_prompts(config: RunConfig) -> Prompts:
    """Read and check every row. Blocks: call it in a thread. Raises DataError."""
    dataset = open_dataset(config, config.data.train_data)
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
        shuffle=config.data.shuffle,
        max_visits=max_visits,
    )
    probe = probe_of(dataset, config.rollout.max_model_len)
    eval_data = config.data.eval_data
    evaluated = open_dataset(config, eval_data) if eval_data else None
    return Prompts(dataset.tokenizer, dataset, cursor, probe, evaluated)


def fingerprints_of(prompts: Prompts) -> tuple[str, ...]:
    """Of all data that groups are made from."""
    evaluated = () if prompts.evaluated is None else (prompts.evaluated.fingerprint,)
    return (prompts.dataset.fingerprint, *evaluated)


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
