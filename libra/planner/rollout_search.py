"""TP degrees that a rollout instance may have, and what one of each costs."""

from collections.abc import Iterator

from libra.config.arithmetic import VLLM_VOCABULARY_MULTIPLE, padded
from libra.config.run import RunConfig
from libra.planner.cost_models import CostModels
from libra.planner.pruning import PruneLog
from libra.planner.rollout_cost import InstanceCost


def instance_costs(
    config: RunConfig, models: CostModels, log: PruneLog, *, most_gpus: int
) -> list[InstanceCost]:
    """Costs of the degrees that fit, ascending by TP; the others are in `log`.

    A server is one node's process, so a degree above the node's GPUs never fits.
    """
    return list(_feasible(config, models, log, most_gpus))


def _feasible(
    config: RunConfig, models: CostModels, log: PruneLog, most_gpus: int
) -> Iterator[InstanceCost]:
    allowed = config.global_resource_planner.allowed_rollout_tp
    degrees = sorted(set(allowed)) if allowed else _powers_of_two(models.rates.gpus_per_node)
    for tp in degrees:
        reason = _reason(tp, models, most_gpus)
        if reason:
            log.cut(f"rollout TP{tp}", reason)
        else:
            yield models.instance.cost(tp)


def _reason(tp: int, models: CostModels, most_gpus: int) -> str:
    """Why no instance can have this TP; empty when one may."""
    arch = models.instance.arch
    width = arch.moe_intermediate_size if arch.num_experts else arch.intermediate_size
    rows = padded(arch.vocab_size, VLLM_VOCABULARY_MULTIPLE)
    budget = models.rollout_memory.budget(tp)
    if tp > models.rates.gpus_per_node:
        return f"a node has {models.rates.gpus_per_node} GPUs"
    if tp > most_gpus:
        return f"{most_gpus} GPUs may serve"
    for what, size in (
        ("attention heads", arch.num_attention_heads),
        ("columns of the MLP", width),
        ("padded words of the vocabulary", rows),
    ):
        if size % tp:
            return f"{size} {what} do not divide by it"
    if not budget.fits:
        return str(budget)
    tokens = models.rollout_memory.kv_capacity_tokens(tp)
    needed = models.rollout_memory.max_model_len
    if tokens < needed:
        return f"the KV cache holds {tokens} tokens, one sequence may have {needed}"
    return ""


def _powers_of_two(largest: int) -> list[int]:
    return [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent <= largest]
