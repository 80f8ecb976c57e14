"""Batch arithmetic in prompts and samples, the learning-rate schedule, when a run stops."""

from collections.abc import Iterator

from libra.config.arithmetic import (
    common_multiple,
    data_parallel_size,
    model_parallel_size,
    nearest_divisors,
    nearest_multiples,
    optimizer_steps,
    samples_per_optimizer_step,
)
from libra.config.problems import Problem, one_of
from libra.config.run import RunConfig

MODEL_PARALLEL = ("train_tp_size", "train_pp_size", "train_cp_size")


def whole_groups(config: RunConfig) -> Iterator[Problem]:
    """Check that a batch holds whole prompt groups."""
    batch, n = config.training.batch_size, config.algorithm.n_samples
    if batch % n:
        yield Problem(
            path="batch_size",
            what=f"{batch} samples are no whole number of prompts x {n} samples (n_samples)",
            hint=f"nearest: batch_size {one_of(nearest_multiples(batch, n))}, "
            f"or n_samples {one_of(nearest_divisors(n, batch))}",
            related=("n_samples",),
        )


def whole_optimizer_steps(config: RunConfig) -> Iterator[Problem]:
    """Check that mini-batches divide the batch."""
    batch, mini = config.training.batch_size, config.training.mini_batch_size
    if mini and batch % mini:
        yield Problem(
            path="mini_batch_size",
            what=f"{batch} samples (batch_size) are no whole number of optimizer steps x {mini} "
            "samples",
            hint=f"nearest: mini_batch_size {one_of(nearest_divisors(mini, batch))}, "
            f"or batch_size {one_of(nearest_multiples(batch, mini))}",
            related=("batch_size",),
        )


def whole_micro_batches(config: RunConfig) -> Iterator[Problem]:
    """Check that an optimizer step's samples divide over ranks and micro-batches."""
    training, mini = config.training, samples_per_optimizer_step(config)
    dp = data_parallel_size(config)
    if dp is None or mini % (dp * training.micro_batch_size) == 0:
        return
    key = "mini_batch_size" if training.mini_batch_size else "batch_size"
    multiple = dp * training.micro_batch_size
    if key == "batch_size":
        multiple = common_multiple(multiple, config.algorithm.n_samples)
    hints = [f"{key} {one_of(nearest_multiples(mini, multiple))}"]
    if mini % training.micro_batch_size == 0:
        sizes = nearest_divisors(dp, mini // training.micro_batch_size)
        gpus = tuple(size * model_parallel_size(config) for size in sizes)
        hints.append(f"data-parallel size {one_of(sizes)} (train_gpus {one_of(gpus)})")
    if mini % dp == 0:
        sizes = nearest_divisors(training.micro_batch_size, mini // dp)
        hints.append(f"micro_batch_size {one_of(sizes)}")
    yield Problem(
        path=key,
        what=f"an optimizer step of {mini} samples does not divide over {dp} data-parallel ranks "
        f"x {training.micro_batch_size} samples (micro_batch_size)",
        hint=f"nearest: {', or '.join(hints)}",
        related=("micro_batch_size", "train_gpus", *MODEL_PARALLEL, "n_samples"),
    )


def recompute_fits(config: RunConfig) -> Iterator[Problem]:
    """Check that recompute_logprobs can fill its temporary batch."""
    training, dp = config.training, data_parallel_size(config)
    if not (dp and training.recompute_logprobs):
        return
    share = training.batch_size // dp
    if training.recompute_micro_batch_size > max(share, 1):
        yield Problem(
            path="recompute_micro_batch_size",
            what=f"{training.recompute_micro_batch_size} samples exceed a rank's share of the "
            f"batch, {share}",
            hint=f"nearest: {max(share, 1)}",
            related=("batch_size", "train_gpus", *MODEL_PARALLEL),
        )


def run_ends(config: RunConfig) -> Iterator[Problem]:
    """Check that something stops the run."""
    control = config.control
    if control.total_steps is None and control.epochs is None and control.max_run_s is None:
        yield Problem(
            path="total_steps",
            what="nothing would stop this run",
            hint="set total_steps, epochs or max_run_s",
            related=("epochs", "max_run_s"),
        )


def schedule_has_an_end(config: RunConfig) -> Iterator[Problem]:
    """Check that a decaying learning rate knows where it ends."""
    training = config.training
    if training.lr_schedule == "constant":
        return
    if not training.lr_decay_steps and config.control.total_steps is None:
        yield Problem(
            path="lr_decay_steps",
            what=f"lr_schedule {training.lr_schedule} has no end without total_steps",
            hint="set lr_decay_steps (in optimizer steps) or total_steps",
            related=("lr_schedule", "total_steps"),
        )
    decay_steps, said_by = training.lr_decay_steps, "lr_decay_steps"
    if not decay_steps:
        decay_steps = (config.control.total_steps or 0) * optimizer_steps(config)
        said_by = "total_steps"
    if decay_steps and training.lr_warmup_steps >= decay_steps:
        yield Problem(
            path="lr_warmup_steps",
            what=f"{training.lr_warmup_steps} optimizer steps of warm-up leave none of the "
            f"{decay_steps} ({said_by})",
            hint=f"at most {decay_steps - 1}",
            related=(said_by,),
        )


def offload_offloads(config: RunConfig) -> Iterator[Problem]:
    """Check that an optimizer that is to be offloaded is so in part at least."""
    megatron = config.megatron
    if megatron.megatron_optimizer_cpu_offload and not megatron.megatron_optimizer_offload_fraction:
        yield Problem(
            path="megatron_optimizer_cpu_offload",
            what="moves nothing while megatron_optimizer_offload_fraction is 0",
            hint="set that above 0; 1 offloads all of the optimizer state",
            related=("megatron_optimizer_offload_fraction",),
        )


def dual_clip_is_above_one(config: RunConfig) -> Iterator[Problem]:
    """Check that dual clip, when on, lies above the ratio 1."""
    dual = config.algorithm.clip_ratio_dual
    if 0 < dual <= 1:
        yield Problem(
            path="clip_ratio_dual",
            what=f"{dual:g} would cap every loss with a negative advantage",
            hint="0 turns it off; 3 is usual",
        )


def lower_clip_is_below_one(config: RunConfig) -> Iterator[Problem]:
    """Check that the lower clip leaves a positive ratio."""
    low = config.algorithm.clip_ratio_low
    if low > 1:
        what = f"{low:g} would put the lower bound of the ratio under 0"
        yield Problem(path="clip_ratio_low", what=what, hint="nearest: 1")


def importance_bounds_are_ordered(config: RunConfig) -> Iterator[Problem]:
    """Check IcePop's interval."""
    algorithm = config.algorithm
    if (
        algorithm.importance_correction == "icepop"
        and algorithm.importance_floor >= algorithm.importance_cap
    ):
        yield Problem(
            path="importance_floor",
            what=f"{algorithm.importance_floor:g} is not under importance_cap, "
            f"{algorithm.importance_cap:g}",
            hint="every token would be masked",
            related=("importance_cap",),
        )


def groups_of_one_learn_nothing(config: RunConfig) -> Iterator[Problem]:
    """Check that there is somebody to compare a sample with."""
    if config.algorithm.n_samples == 1:
        yield Problem(
            path="n_samples",
            what="a group of 1 sample has no baseline: every advantage is 0",
            hint="nearest: 2",
        )


def correction_needs_recompute(config: RunConfig) -> Iterator[Problem]:
    """Warn when the importance correction would always see a weight of 1."""
    if config.training.recompute_logprobs or config.algorithm.importance_correction == "none":
        return
    yield Problem(
        path="importance_correction",
        what="has no effect while recompute_logprobs is false: the engine's logprobs stand in for "
        "the proximal policy, so each weight is 1",
        related=("recompute_logprobs",),
    )


RULES = (
    whole_groups,
    whole_optimizer_steps,
    whole_micro_batches,
    recompute_fits,
    run_ends,
    schedule_has_an_end,
    offload_offloads,
    dual_clip_is_above_one,
    lower_clip_is_below_one,
    importance_bounds_are_ordered,
    groups_of_one_learn_nothing,
)
WARNINGS = (correction_needs_recompute,)
