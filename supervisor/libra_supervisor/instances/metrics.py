"""One vLLM /metrics page -> what scheduling and health need of it. Pure.

Read from vLLM 0.22 and 0.32, and the KV gauge's name before 0.10. A DP server has one series per
`engine` label: counts are summed, the KV use is the fullest engine's. A sample that cannot be (no
number here is negative, infinite or beyond MAX_VALUE) is dropped by itself.
"""

from collections.abc import Mapping
from math import fsum

import msgspec

from libra.ids import Incarnation
from libra.models.kv_capacity import measured_kv_capacity_tokens
from libra.scheduling.load import EngineLoad, LoadSnapshot
from libra.tracing.prometheus import Sample, largest, read_samples, total
from libra_supervisor.instances.serving_meter import ServingCounters

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
KV_USE = "vllm:kv_cache_usage_perc"
OLD_KV_USE = "vllm:gpu_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"
CACHE_CONFIG = "vllm:cache_config_info"
STARTED_AT = "process_start_time_seconds"
LATENCY_SUM = "vllm:inter_token_latency_seconds_sum"
LATENCY_COUNT = "vllm:inter_token_latency_seconds_count"
ENGINE_STEPS = "vllm:iteration_tokens_total_count"
COMPUTED_PROMPT_TOKENS = "vllm:request_prefill_kv_computed_tokens_sum"

MAX_VALUE = 1e18
"""More than any counter here can have counted."""

MAX_DIGITS = 18

WANTED = frozenset(
    {
        RUNNING,
        WAITING,
        WAITING_BY_REASON,
        KV_USE,
        OLD_KV_USE,
        PREEMPTIONS,
        PROMPT_TOKENS,
        GENERATION_TOKENS,
        CACHE_CONFIG,
        STARTED_AT,
        LATENCY_SUM,
        LATENCY_COUNT,
        ENGINE_STEPS,
        COMPUTED_PROMPT_TOKENS,
    }
)


class ServerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A page's numbers; None where the page does not say."""

    load: LoadSnapshot
    num_tokens: float | None
    """Prompt and generated tokens since the process started: it moves while work is done."""

    serving: ServingCounters | None = None
    """None when the page lacks one of them."""


def server_metrics(text: str, *, incarnation: Incarnation, sampled_at: float) -> ServerMetrics:
    samples = _plausible(read_samples(text, WANTED))
    load = LoadSnapshot(
        incarnation=incarnation,
        sampled_at=sampled_at,
        num_running=total(samples, RUNNING),
        num_waiting=total(samples, WAITING),
        num_waiting_for_capacity=total(samples, WAITING_BY_REASON, reason="capacity"),
        kv_use_fraction=_kv_use(samples),
        num_preemptions=total(samples, PREEMPTIONS),
        kv_capacity_tokens=_kv_capacity_tokens(samples.get(CACHE_CONFIG, [])),
        process_started_at_s=largest(samples, STARTED_AT),
        engines=_engines(samples),
    )
    counters = [total(samples, name) for name in (PROMPT_TOKENS, GENERATION_TOKENS)]
    known = [value for value in counters if value is not None]
    return ServerMetrics(
        load=load, num_tokens=fsum(known) if known else None, serving=_serving(samples)
    )


def _engines(samples: dict[str, list[Sample]]) -> tuple[EngineLoad, ...]:
    """Each engine by itself; none when there is only one."""
    names = {
        sample.labels.get("engine", "")
        for series in (RUNNING, WAITING, KV_USE, OLD_KV_USE)
        for sample in samples.get(series, ())
    }
    if len(names) < 2:  # noqa: PLR2004 - one engine is the server
        return ()
    in_order = sorted(names, key=lambda name: (len(name), name))  # 9 before 10
    return tuple(_engine(samples, name) for name in in_order)


def _engine(samples: dict[str, list[Sample]], name: str) -> EngineLoad:
    return EngineLoad(
        engine=name,
        num_running=total(samples, RUNNING, engine=name),
        num_waiting=total(samples, WAITING, engine=name),
        kv_use_fraction=_kv_use(samples, engine=name),
    )


def _kv_use(samples: dict[str, list[Sample]], **labels: str) -> float | None:
    use = largest(samples, KV_USE, **labels)
    return largest(samples, OLD_KV_USE, **labels) if use is None else use


def _plausible(samples: dict[str, list[Sample]]) -> dict[str, list[Sample]]:
    return {name: [s for s in found if _can_be(name, s.value)] for name, found in samples.items()}


def _can_be(name: str, value: float) -> bool:
    return 0.0 <= value <= (1.0 if name in (KV_USE, OLD_KV_USE) else MAX_VALUE)


def _serving(samples: dict[str, list[Sample]]) -> ServingCounters | None:
    latency_s, num_latencies = total(samples, LATENCY_SUM), total(samples, LATENCY_COUNT)
    steps, generated = total(samples, ENGINE_STEPS), total(samples, GENERATION_TOKENS)
    computed = total(samples, COMPUTED_PROMPT_TOKENS)
    if (
        latency_s is None
        or num_latencies is None
        or steps is None
        or generated is None
        or computed is None
    ):
        return None
    return ServingCounters(
        latency_s=latency_s,
        num_latencies=num_latencies,
        num_engine_steps=steps,
        num_generated_tokens=generated,
        num_computed_prompt_tokens=computed,
    )


def _kv_capacity_tokens(configs: list[Sample]) -> int | None:
    """Sum over the engines of the labels of cache_config_info; None when one does not say."""
    capacities = [_capacity_of(config.labels) for config in configs]
    known = [capacity for capacity in capacities if capacity is not None]
    return sum(known) if known and len(known) == len(capacities) else None


def _capacity_of(labels: Mapping[str, str]) -> int | None:
    return measured_kv_capacity_tokens(
        kv_cache_size_tokens=_count(labels, "kv_cache_size_tokens"),
        num_gpu_blocks=_count(labels, "num_gpu_blocks"),
        block_size=_count(labels, "block_size"),
    )


def _count(labels: Mapping[str, str], name: str) -> int | None:
    # An unset option is exposed as the text "None".
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else None
