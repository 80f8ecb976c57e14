"""What the cost model says about a step that has been, beside what was measured.

The prediction is made for the lengths that the step really had, so that its error is the model's
and not that of the assumed lengths. Each operation whose measurement says something about it gives
an observation for the calibration book.
"""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from libra.config.run import RunConfig
from libra.planner.calibration import Calibration, Observation, Operation
from libra.planner.cost_models import CostModels, cost_models
from libra.planner.demand import Demand, num_batches_in_flight, prefill_share
from libra.planner.memory import TrainMemory
from libra.planner.pricing import train_work
from libra.planner.rollout_cost import step_seconds, workload_of
from libra.planner.spread import spread_over
from libra.planner.train_layout import TrainLayout

Lengths = Sequence[tuple[int, int]]
"""(prompt tokens, response tokens) of each trajectory."""

_DOMINANT = 0.5
"""Share of an engine step from which on the step says something about an operation."""


class ServingUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the instances of one TP degree did in an interval, by their own counters."""

    tp: int
    latency_s: float
    """Sum of the times from one token of a request to its next."""

    num_latencies: float
    num_engine_steps: float
    num_generated_tokens: float
    num_computed_prompt_tokens: float


class StepSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured in one training step."""

    batch: Lengths
    finished: Lengths
    """Of all trajectories that ended meanwhile, dropped ones included."""

    recompute_s: float
    update_s: float
    rollout_s: float
    """Wall time with a sample in flight, reloads not counted."""

    export_s: float
    sync_s: float
    peak_bytes: int | None
    """Of the fullest rank since it started; None where it says nothing about the model (CPU)."""

    longest_tokens: int
    """Of a trained sequence since the ranks started."""

    serving: tuple[ServingUse, ...] = ()


class StepForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Corrected predictions of one step; None where there is nothing to predict."""

    train_s: float
    rollout_s: float | None
    peak_bytes: int | None


class RunningPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is running."""

    config: RunConfig
    """With the plan written into it."""

    layout: TrainLayout
    tps: tuple[int, ...]


def forecast_of(running: RunningPlan, book: Calibration, seen: StepSeen) -> StepForecast:
    """What the model, corrected by `book`, says about the step.

    Raises ConfigError when hardware or model are not described.
    """
    models = cost_models(running.config, book)
    train = models.train.cost(
        running.layout, train_work(running.config, _demand(running, seen.batch))
    )
    peak_bytes = None
    if seen.peak_bytes is not None:
        static, update, recompute = _peak(models.train_memory, running.layout, seen.longest_tokens)
        peak_bytes = static + max(update, recompute)
    return StepForecast(
        train_s=train.total_s,
        rollout_s=_rollout_s(running, models, seen.finished),
        peak_bytes=peak_bytes,
    )


def observations_of(
    running: RunningPlan, book: Calibration, seen: StepSeen
) -> tuple[Observation, ...]:
    """What the step teaches; `book` only splits engine steps between prefill and decode."""
    models = cost_models(running.config, Calibration(hardware=book.hardware, model=book.model))
    train = models.train.cost(
        running.layout, train_work(running.config, _demand(running, seen.batch))
    )
    pairs: list[tuple[Operation, float, float]] = [
        ("recompute_logprobs", train.recompute_logprobs_s, seen.recompute_s),
        ("grpo_update", train.grpo_update_s, seen.update_s),
        ("weight_export", models.publish.export_s, seen.export_s),
        ("weight_sync", models.publish.sync_s(running.tps), seen.sync_s),
    ]
    if seen.peak_bytes is not None:
        static, update, recompute = _peak(models.train_memory, running.layout, seen.longest_tokens)
        operation: Operation = "train_memory" if update >= recompute else "recompute_memory"
        pairs.append((operation, max(update, recompute), seen.peak_bytes - static))
    pairs += _serving_pairs(models, book, seen)
    return tuple(
        Observation(operation=operation, predicted=predicted, measured=measured)
        for operation, predicted, measured in pairs
        if predicted > 0 and measured > 0
    )


def error_fraction(*, predicted: float | None, measured: float | None) -> float | None:
    """Measured / predicted - 1; None when one of them is missing or nothing."""
    if not predicted or not measured:
        return None
    return measured / predicted - 1


def _demand(running: RunningPlan, lengths: Lengths) -> Demand:
    return Demand(
        prompt_tokens=tuple(prompt for prompt, _ in lengths),
        response_tokens=tuple(response for _, response in lengths),
        source="this step",
        prefill_share=prefill_share(running.config),
        num_batches=num_batches_in_flight(running.config),
    )


def _rollout_s(running: RunningPlan, models: CostModels, finished: Lengths) -> float | None:
    """Time for what ended in the step, as the planner counts it; None where nothing serves."""
    if not (finished and running.tps):
        return None
    demand = _demand(running, finished)
    layout = spread_over(
        [models.instance.cost(tp) for tp in running.tps],
        workload_of(demand),
        by_capacity=running.config.heterogeneous_rollout.scheduling.load_metric == "kv_tokens",
    )
    return layout.makespan_s / demand.num_batches


def _peak(memory: TrainMemory, layout: TrainLayout, longest_tokens: int) -> tuple[int, int, int]:
    """(static, update, recompute) bytes with rows of `longest_tokens`."""
    shorter = replace(memory, max_model_len=longest_tokens)
    static, whole = shorter.recompute_peak_bytes(layout)
    return static, shorter.update_bytes(layout), whole - static


def _serving_pairs(
    models: CostModels, book: Calibration, seen: StepSeen
) -> list[tuple[Operation, float, float]]:
    """Latency between tokens is one engine step: decode, and the prompts computed in it."""
    decode_s = prefill_s = latency_s = 0.0
    context = _mean_context(seen.finished)
    for use in seen.serving:
        if not (use.num_latencies and use.num_engine_steps and use.num_generated_tokens):
            continue
        cost = models.instance.cost(use.tp)
        num_sequences = max(1.0, use.num_generated_tokens / use.num_engine_steps)
        step_s = step_seconds(
            cost, num_sequences=num_sequences, cached_tokens=num_sequences * context
        )
        prompts_per_step = use.num_computed_prompt_tokens / use.num_engine_steps
        decode_s += use.num_latencies * step_s
        prefill_s += use.num_latencies * prompts_per_step * cost.prompt_token_s
        latency_s += use.latency_s
    corrected_decode_s = decode_s * book.ratio("rollout_decode")
    corrected_prefill_s = prefill_s * book.ratio("rollout_prefill")
    if not latency_s:
        return []
    if corrected_decode_s >= _DOMINANT * (corrected_decode_s + corrected_prefill_s):
        return [("rollout_decode", decode_s, latency_s - corrected_prefill_s)]
    return [("rollout_prefill", prefill_s, latency_s - corrected_decode_s)]


def _mean_context(lengths: Lengths) -> float:
    """Tokens in the cache of a sequence at an average decode step."""
    num_steps = sum(response for _, response in lengths)
    if not num_steps:
        return 0.0
    return sum(prompt * n + n * (n + 1) / 2 for prompt, n in lengths) / num_steps
