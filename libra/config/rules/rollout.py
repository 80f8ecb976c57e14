"""Token lengths, staleness, rollout devices, KV cache, ports, names of user code."""

import re
from collections.abc import Iterator, Mapping
from math import inf

from libra.config.arithmetic import num_rollout_instances, planner_decides, rollout_buckets
from libra.config.problems import Problem
from libra.config.run import RunConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_KV_CACHE_BYTES = 64 * 2**20
"""What rollout_kv_cache_bytes 0 means on CPU."""

MAX_RUN_NAME_BYTES = 200
"""File systems take 255; the time the run started comes after it."""

_URL = re.compile(r"^https?://(?:\[[0-9A-Fa-f:.]+\]|[^\s/:@\[\]]+):[0-9]{1,5}/?$")


def response_fits_context(config: RunConfig) -> Iterator[Problem]:
    """Check that a prompt has room beside the response."""
    new, length = config.rollout.max_new_tokens, config.rollout.max_model_len
    if new >= length:
        yield Problem(
            path="max_new_tokens",
            what=f"{new} tokens leave no room for a prompt in max_model_len, {length}",
            hint=f"at most {length - 1}" if length > 1 else "raise max_model_len",
            related=("max_model_len",),
        )


def context_fits_model(config: RunConfig) -> Iterator[Problem]:
    """Check max_model_len against the positions that the model knows."""
    arch, length = config.model_arch, config.rollout.max_model_len
    if arch and arch.max_position_embeddings and length > arch.max_position_embeddings:
        yield Problem(
            path="max_model_len",
            what=f"{length} tokens exceed the model's {arch.max_position_embeddings} positions",
            hint=f"at most {arch.max_position_embeddings}",
            related=("model_arch.max_position_embeddings",),
        )


def kv_cache_holds_a_sequence(config: RunConfig) -> Iterator[Problem]:
    """Check that one sequence of max_model_len fits the cache; vLLM does not start otherwise."""
    arch, rollout = config.model_arch, config.rollout
    on_cpu = config.control.device == "cpu"
    cache_bytes = rollout.rollout_kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else 0)
    if arch is None or not cache_bytes:
        return
    dtype = (
        config.training.train_dtype if rollout.rollout_dtype == "auto" else rollout.rollout_dtype
    )
    smallest_tp = min((bucket.tp for bucket in rollout_buckets(config)), default=1)
    heads = -(-arch.num_key_value_heads // smallest_tp)
    token_bytes = 2 * arch.num_layers * heads * arch.head_dim * DTYPE_BYTES[dtype]
    needed = token_bytes * rollout.max_model_len
    if cache_bytes < needed:
        yield Problem(
            path="rollout_kv_cache_bytes",
            what=f"{cache_bytes} bytes hold {cache_bytes // token_bytes} tokens of {token_bytes} "
            f"bytes, fewer than max_model_len, {rollout.max_model_len}",
            hint=f"at least {needed}, or a max_model_len of at most {cache_bytes // token_bytes}",
            related=("max_model_len",),
        )


def whole_lag(config: RunConfig) -> Iterator[Problem]:
    """Check that the staleness bound is a number of versions."""
    bound = config.rollout.max_head_offpolicyness
    if bound != inf and not bound.is_integer():
        yield Problem(
            path="max_head_offpolicyness",
            what=f"{bound:g} is no whole number of policy versions",
            hint=f"nearest: {int(bound)} or {int(bound) + 1}, or .inf for no bound",
        )


def lag_covers_sync_interval(config: RunConfig) -> Iterator[Problem]:
    """Check that some trajectory could be fresh enough at every step."""
    bound, interval = config.rollout.max_head_offpolicyness, config.weights.sync_interval
    if config.weights.rollout_weight_sync_mode == "none":
        if bound != inf:
            yield Problem(
                path="max_head_offpolicyness",
                what="must be .inf while rollout_weight_sync_mode is none: the engines keep v0, so "
                f"after step {int(bound) + 1} nothing would be fresh enough",
                hint="write .inf",
                related=("rollout_weight_sync_mode",),
            )
    elif bound < interval - 1:
        yield Problem(
            path="max_head_offpolicyness",
            what=f"{bound:g} is less than sync_interval - 1, {interval - 1}: nothing could be "
            "trained just before a sync",
            hint=f"at least {interval - 1}, or a sync_interval of at most {int(bound) + 1}",
            related=("sync_interval", "rollout_weight_sync_mode"),
        )


def a_group_can_be_admitted(config: RunConfig) -> Iterator[Problem]:
    """Check that max_concurrent_rollouts has room for one whole group."""
    limit, n = config.rollout.max_concurrent_rollouts, config.algorithm.n_samples
    if limit < n:
        yield Problem(
            path="max_concurrent_rollouts",
            what=f"{limit} trajectories are less than one group of {n} (n_samples); groups are "
            "admitted whole",
            hint=f"nearest: {n}",
            related=("n_samples",),
        )


def buckets_use_every_gpu(config: RunConfig) -> Iterator[Problem]:
    """Check the pinned instances against rollout_gpus and the planner."""
    instances, gpus = config.heterogeneous_rollout.instances, config.rollout.rollout_gpus
    path = "heterogeneous_rollout.instances"
    strategy = "global_resource_planner.initial_allocation_strategy"
    if not instances:
        return
    if planner_decides(config):
        yield Problem(
            path=path,
            what="pins the split that the planner is asked to choose",
            hint=f"remove it, or set {strategy} to configured",
            related=(strategy,),
        )
        return
    used = sum(bucket.tp * bucket.count for bucket in instances)
    if used != gpus:
        terms = " + ".join(f"{bucket.count} x TP {bucket.tp}" for bucket in instances)
        yield Problem(
            path=path,
            what=f"{terms} use {used} GPUs, not rollout_gpus, {gpus}",
            hint=f"set rollout_gpus to {used} or change the counts",
            related=("rollout_gpus",),
        )


def somebody_serves(config: RunConfig) -> Iterator[Problem]:
    """Check that rollout has servers of ours, or endpoints of somebody else's, not both."""
    manages = config.global_resource_planner.runtime_manage_rollout_processes
    switch = "global_resource_planner.runtime_manage_rollout_processes"
    endpoints = config.heterogeneous_rollout.endpoints
    if manages and endpoints:
        yield Problem(
            path="heterogeneous_rollout.endpoints",
            what=f"are servers that Libra must not manage, but {switch} is true",
            hint="set that to false, or remove the endpoints",
            related=(switch,),
        )
    if not manages and not endpoints:
        yield Problem(
            path="heterogeneous_rollout.endpoints",
            what=f"is empty, and with {switch} false Libra starts no servers",
            hint="name the servers: [{url: 'http://host:port', tp: 1}]",
            related=(switch,),
        )
    if manages and not config.rollout.rollout_gpus:
        yield Problem(
            path="rollout_gpus", what="is 0, so nothing would generate", hint="nearest: 1",
            related=(switch,),
        )  # fmt: skip


def others_are_left_alone(config: RunConfig) -> Iterator[Problem]:
    """Check that nothing needs servers to be started or ended that are not ours."""
    switch = "global_resource_planner.runtime_manage_rollout_processes"
    if config.global_resource_planner.runtime_manage_rollout_processes:
        return
    weights = config.weights
    publishes = weights.rollout_weight_sync_mode != "none"
    if publishes and weights.rollout_weight_reload_method == "restart":
        yield Problem(
            path="rollout_weight_reload_method",
            what=f"restart replaces servers, which {switch}: false forbids",
            hint="nearest: inplace",
            related=(switch,),
        )
    if planner_decides(config):
        yield Problem(
            path="global_resource_planner.initial_allocation_strategy",
            what=f"grp chooses instances, which {switch}: false leaves to others",
            hint="nearest: configured",
            related=(switch,),
        )
    if config.global_resource_planner.runtime_dynamic_reconfiguration_enabled:
        yield Problem(
            path="global_resource_planner.runtime_dynamic_reconfiguration_enabled",
            what=f"changes servers, which {switch}: false forbids",
            hint="set it to false",
            related=(switch,),
        )


def endpoints_are_urls(config: RunConfig) -> Iterator[Problem]:
    """Check that each endpoint is the root of a server, once."""
    seen: set[str] = set()
    for index, endpoint in enumerate(config.heterogeneous_rollout.endpoints):
        path = f"heterogeneous_rollout.endpoints[{index}].url"
        if not _URL.match(endpoint.url):
            yield Problem(path=path, what=f"{endpoint.url!r} is not of the form http://host:port")
        elif endpoint.url.rstrip("/") in seen:
            yield Problem(path=path, what=f"{endpoint.url} is named twice")
        seen.add(endpoint.url.rstrip("/"))


def ports_are_free_of_each_other(config: RunConfig) -> Iterator[Problem]:
    """Check that the engines' port range fits and leaves the API's port alone."""
    base, instances = config.rollout.rollout_port_base, num_rollout_instances(config)
    if not base or not instances:
        return
    last = base + instances - 1
    if last > 65535:  # noqa: PLR2004 - the largest port
        yield Problem(
            path="rollout_port_base",
            what=f"{instances} instances need ports {base} to {last}",
            hint=f"at most {65536 - instances}",
            related=("heterogeneous_rollout.instances", "rollout_gpus"),
        )
    port = config.api.api_port
    if port and base <= port <= last:
        yield Problem(
            path="api.api_port",
            what=f"{port} is one of the engines' ports {base} to {last} (rollout_port_base)",
            hint=f"choose one under {base} or over {last}",
            related=("rollout_port_base",),
        )


def run_name_is_a_file_name(config: RunConfig) -> Iterator[Problem]:
    """Check that the run directory can carry the name."""
    name = config.control.run_name
    if "/" in name or name.startswith(".") or not name.isprintable():
        yield Problem(
            path="run_name",
            what=f"{name!r} cannot be part of a directory's name",
            hint="use letters, digits, - and _",
        )
    elif len(name.encode()) > MAX_RUN_NAME_BYTES:
        yield Problem(
            path="run_name",
            what=f"{len(name.encode())} bytes are too long for a directory's name",
            hint=f"at most {MAX_RUN_NAME_BYTES}",
        )


OWN_FLAGS: Mapping[str, str] = {
    "--model": "model_path",
    "--tokenizer": "tokenizer_path",
    "--dtype": "rollout_dtype",
    "--tensor-parallel-size": "heterogeneous_rollout.instances",
    "-tp": "heterogeneous_rollout.instances",
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "rollout_max_num_seqs",
    "--seed": "seed",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--kv-cache-memory-bytes": "rollout_kv_cache_bytes",
    "--enforce-eager": "rollout_enforce_eager",
    "--port": "rollout_port_base",
    "--host": "",
    "--served-model-name": "",
    "--logprobs-mode": "",
    "--generation-config": "",
    "--scheduling-policy": "",
    "--middleware": "",
    "--worker-extension-cls": "",
    "--weight-transfer-config": "rollout_weight_sync_mode",
    "--enable-sleep-mode": "global_resource_planner.runtime_lent_servers",
}
"""Arguments of `vllm serve` that a run sets itself, with the option that decides, if one does."""


def extra_args_leave_ours_alone(config: RunConfig) -> Iterator[Problem]:
    """Check that no extra argument undoes what the run relies on."""
    for argument in config.rollout.rollout_extra_args:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag in OWN_FLAGS:
            option = OWN_FLAGS[flag]
            yield Problem(
                path="rollout_extra_args",
                what=f"{flag} is set by the run itself",
                hint=f"set {option}" if option else "leave it out",
            )


def frozen_engines(config: RunConfig) -> Iterator[Problem]:
    """Warn that the engines never learn."""
    if config.weights.rollout_weight_sync_mode == "none":
        yield Problem(
            path="rollout_weight_sync_mode",
            what="none leaves the engines at the base model: training goes ever further off-policy",
        )


RULES = (
    response_fits_context,
    context_fits_model,
    kv_cache_holds_a_sequence,
    whole_lag,
    lag_covers_sync_interval,
    a_group_can_be_admitted,
    buckets_use_every_gpu,
    somebody_serves,
    others_are_left_alone,
    endpoints_are_urls,
    ports_are_free_of_each_other,
    run_name_is_a_file_name,
    extra_args_leave_ours_alone,
)
WARNINGS = (frozen_engines,)
