"""`validate` for people: plain lines, the same on a terminal and in a file."""

from collections.abc import Iterable, Iterator

from libra.config.wording import yaml_words
from libra_supervisor.validate.ports import DatasetSummary, RoleMemory
from libra_supervisor.validate.report import ConfigReport, Finding

GIB = 2**30
MIB = 2**20
EXAMPLE_TOKENS = 64
"""Tokens of the example prompt that are shown from each end."""


def render(report: ConfigReport) -> str:
    """Lines for people: what follows from the options first, then every option."""
    sections = (
        ("Batch", _batch(report)),
        ("Staleness", _staleness(report)),
        ("Devices", _devices(report)),
        ("Memory", _memory(report.memory)),
        ("Data", _dataset(report.dataset)),
        ("Warnings", _warnings(report.warnings)),
        ("Options", _options(report)),
    )
    lines = [f"{report.sources[0]} is valid"]
    for title, body in sections:
        found = list(body)
        if found:
            lines += ["", title, *(f"  {line}" for line in found)]
    return "\n".join(lines) + "\n"


def _batch(report: ConfigReport) -> Iterator[str]:
    batch = report.batch
    steps = _count(batch.optimizer_steps, "optimizer step")
    yield (
        f"{_count(batch.prompts, 'prompt')} x {batch.samples_per_prompt} samples "
        f"= {batch.samples} samples = {steps} x {batch.samples_per_optimizer_step} samples"
    )
    if batch.samples_per_rank is None or batch.micro_batches_per_rank is None:
        yield "how an optimizer step divides over ranks is the planner's choice"
    else:
        passes = _count(batch.micro_batches_per_rank, "micro-batch", "micro-batches")
        size = batch.samples_per_rank // batch.micro_batches_per_rank
        ranks = _count(batch.data_parallel_size or 1, "data-parallel rank")
        yield (
            f"one optimizer step = {ranks} x {batch.samples_per_rank} samples; "
            f"a rank takes {passes} x {size} samples"
        )
    if report.steps_per_epoch is None:
        yield f"steps per epoch = rows / {batch.prompts} prompts; --data reads the rows"
    elif report.dataset:
        equation = f"{report.dataset.rows} rows / {batch.prompts} prompts"
        yield f"steps per epoch = {equation} = {report.steps_per_epoch:g}"
    if report.total_steps is not None:
        yield f"the run stops after {_count(report.total_steps, 'training step')}"


def _staleness(report: ConfigReport) -> Iterator[str]:
    versions = report.max_policy_versions_in_flight
    said = "any number of policy versions" if versions is None else _count(versions, "version")
    yield f"in flight at most: {said}, {report.max_trajectories_in_flight} trajectories"


def _devices(report: ConfigReport) -> Iterator[str]:
    layout = report.layout
    if layout.data_parallel_size is None:
        yield f"training starts from {layout.train_gpus} GPUs; the planner divides them"
        return
    experts = f" (EP {layout.expert_parallel_size})" if layout.expert_parallel_size > 1 else ""
    yield (
        f"training: {layout.train_gpus} = TP {layout.tensor_parallel_size} x PP "
        f"{layout.pipeline_parallel_size} x CP {layout.context_parallel_size} x DP "
        f"{layout.data_parallel_size}{experts}"
    )
    buckets = (f"{count} x {degree}" for degree, count in layout.rollout_instances.items())
    yield f"rollout: {', '.join(buckets) or 'no instances of ours'}"


def _memory(roles: Iterable[RoleMemory]) -> Iterator[str]:
    for role in roles:
        parts = ", ".join(
            f"{part} {_size(size)}" for part, size in role.bytes_by_part.items() if size
        )
        of = f" of {_size(role.limit_bytes)}" if role.limit_bytes is not None else ""
        yield f"{role.role}: {_size(sum(role.bytes_by_part.values()))}{of} ({parts})"


def _dataset(dataset: DatasetSummary | None) -> Iterator[str]:
    if dataset is None:
        return
    yield (
        f"{_count(dataset.rows, 'row')}, {dataset.skipped_rows} skipped, "
        f"{dataset.over_long_prompts} over-long; "
        f"the longest prompt has {dataset.longest_prompt_tokens} tokens"
    )
    yield f"one prompt, {len(dataset.example_token_ids)} tokens:"
    pairs = [
        f"{token_id}:{text!r}"
        for token_id, text in zip(dataset.example_token_ids, dataset.example_tokens, strict=True)
    ]
    if len(pairs) > 2 * EXAMPLE_TOKENS:
        left_out = len(pairs) - 2 * EXAMPLE_TOKENS
        pairs[EXAMPLE_TOKENS:-EXAMPLE_TOKENS] = [f"... {left_out} more ..."]
    yield " ".join(pairs)


def _warnings(warnings: Iterable[Finding]) -> Iterator[str]:
    for warning in warnings:
        where = f"{warning.where}: " if warning.where else ""
        hint = f"; {warning.hint}" if warning.hint else ""
        yield f"{where}{warning.path}: {warning.what}{hint}"


def _options(report: ConfigReport) -> Iterator[str]:
    for path, option in report.options.items():
        yield f"{path}: {yaml_words(option.value)}  # {option.origin}"


def _size(num_bytes: int) -> str:
    if num_bytes < GIB:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
