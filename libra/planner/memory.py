"""Bytes of device memory, item by item: training ranks and rollout workers.

Training follows Megatron-Core without Transformer Engine: parameters in the training dtype,
float32 main gradients, float32 main weights and two Adam moments. Activations are counted tensor
by tensor for a gated MLP and flash attention, in the manner of Korthikanti et al. 2022. Checked
against a measured peak (docs/decisions/0008-planner-cost-model.md): 1.78 B parameters, micro-batch
2 and 4 of 4096 tokens, 56 and 82 GiB measured, 56.3 and 82.0 GiB here.
"""

from typing import Literal, TypeAlias

import msgspec

from libra.config.model_arch import ModelArchConfig
from libra.config.planning import PlannerConfig
from libra.config.training import MegatronConfig, TrainingConfig
from libra.models.architecture import Architecture, num_parameters
from libra.models.kv_capacity import GIB, kv_bytes_per_token, kv_capacity_tokens
from libra.models.kv_capacity import RolloutMemory as EngineMemory
from libra.models.parameters import (
    attention_width,
    embedding_parameters,
    key_value_width,
    rank_parameters,
)
from libra.planner.calibration import Calibration
from libra.planner.train_layout import TrainLayout

_MAIN_WEIGHT, _MOMENTS, _MAIN_GRADIENT = 4, 8, 4
_PRECISION_AWARE_STATE = 2 + _MOMENTS
"""Bytes with Megatron's precision-aware optimizer on Transformer Engine: the 16 bits that bfloat16
weights lack of float32, and two moments whose dtype the trainer leaves at float32. With offload,
the one way without Transformer Engine, main weights stay whole."""

_BFLOAT16 = 2

Item: TypeAlias = Literal[
    "parameters",
    "gradients",
    "optimizer state",
    "KL reference",
    "activations",
    "logits",
    "recompute-logprobs temporaries",
    "safety margin",
    "weights",
    "activation reserve",
    "KV cache of one sequence",
]


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What one device must hold at its fullest moment."""

    bytes_of: dict[Item, int]
    capacity_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_of.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.capacity_bytes

    @property
    def largest_item(self) -> Item:
        return max(self.bytes_of, key=lambda item: self.bytes_of[item])

    def __str__(self) -> str:
        """`81.2 GiB of 72.0 GiB: optimizer state`."""
        total, capacity = self.total_bytes / GIB, self.capacity_bytes / GIB
        return f"{total:.1f} GiB of {capacity:.1f} GiB: {self.largest_item}"


class TrainMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What the budget of a training rank depends on, apart from the layout."""

    arch: ModelArchConfig
    training: TrainingConfig
    megatron: MegatronConfig
    planner: PlannerConfig
    calibration: Calibration
    capacity_bytes: int
    """Memory of one device."""

    max_model_len: int
    has_reference: bool
    """A second model, frozen, is scored for the KL term."""

    def budget(self, layout: TrainLayout) -> MemoryBudget:
        """The peak of the two phases: the update, or (when checked) recompute-logprobs.

        Activations take `micro_batch_size` sequences of `max_model_len` tokens: the worst case.
        """
        static = self._static_bytes(layout)
        dynamic = self._update_bytes(layout)
        scores = self.training.recompute_logprobs or self.has_reference
        if self.planner.memory_budget_check_enabled and scores:
            recompute = self._recompute_bytes(layout)
            dynamic = max(dynamic, recompute, key=lambda items: sum(items.values()))
        margin: dict[Item, int] = {"safety margin": self.planner.memory_budget_safety_margin_bytes}
        return MemoryBudget(
            bytes_of={**static, **dynamic, **margin}, capacity_bytes=self.capacity_bytes
        )

    def recompute_peak_bytes(self, layout: TrainLayout) -> tuple[int, int]:
        """(static, whole) bytes expected at the peak of recompute-logprobs, margin not counted."""
        static = sum(self._static_bytes(layout).values())
        return static, static + sum(self._recompute_bytes(layout).values())

    def update_bytes(self, layout: TrainLayout) -> int:
        """Bytes beyond the static ones at the peak of the update."""
        return sum(self._update_bytes(layout).values())

    def _static_bytes(self, layout: TrainLayout) -> dict[Item, int]:
        dense, experts = rank_parameters(self.arch, tp=layout.tp, pp=layout.pp, ep=layout.ep)
        shards = layout.cp * layout.dp if self.megatron.megatron_use_distributed_optimizer else 1
        state = dense / shards + experts / max(1, shards // layout.ep)
        per_parameter = self._optimizer_bytes_per_parameter
        if self.megatron.megatron_optimizer_cpu_offload:
            per_parameter *= 1 - self.megatron.megatron_optimizer_offload_fraction
        parameters = (dense + experts) * self._dtype_bytes
        items: dict[Item, int] = {
            "parameters": parameters,
            "gradients": (dense + experts) * _MAIN_GRADIENT,
            "optimizer state": round(state * per_parameter),
        }
        if self.has_reference:
            items["KL reference"] = parameters
        return items

    @property
    def _optimizer_bytes_per_parameter(self) -> float:
        if self._dtype_bytes != _BFLOAT16:
            # float32 parameters are their own main weights.
            return _MOMENTS
        megatron = self.megatron
        if (
            megatron.megatron_use_precision_aware_optimizer
            and not megatron.megatron_optimizer_cpu_offload
        ):
            return _PRECISION_AWARE_STATE
        return _MAIN_WEIGHT + _MOMENTS

    @property
    def _dtype_bytes(self) -> int:
        return _BFLOAT16 if self.training.train_dtype == "bfloat16" else 4

    def _update_bytes(self, layout: TrainLayout) -> dict[Item, int]:
        """Whichever is fuller: the first stage keeps a micro-batch per stage, the last has logits.

        With one stage both are the same rank.
        """
        ratio = self.calibration.ratio("train_memory")
        tokens = layout.micro_batch_size * -(-self.max_model_len // layout.cp)
        layers = -(-self.arch.num_layers // layout.pp)
        kept = self._kept_bytes_per_token_layer(layout.tp) * layers
        working = 0.0
        if self.megatron.megatron_recompute_granularity == "full":
            working = self._layer_bytes_per_token(layout.tp)
        first: dict[Item, int] = {
            "activations": round(ratio * tokens * (kept * layout.pp + working))
        }
        last: dict[Item, int] = {
            "activations": round(ratio * tokens * (kept + working)),
            "logits": round(ratio * self._update_logits_bytes(layout)),
        }
        return max(first, last, key=lambda items: sum(items.values()))

    def _update_logits_bytes(self, layout: TrainLayout) -> float:
        """Logits of one chunk of rows, and the output layer's float32 gradient.

        The trainer never has logits of more rows than recompute_micro_batch_size at once.
        """
        rows = min(layout.micro_batch_size, self.training.recompute_micro_batch_size)
        tokens = rows * -(-self.max_model_len // layout.cp)
        gradient = _MAIN_GRADIENT * embedding_parameters(self.arch) / layout.tp
        return tokens * self._logits_bytes_per_token(layout.tp) + gradient

    def _recompute_bytes(self, layout: TrainLayout) -> dict[Item, int]:
        """A forward pass keeps one block's tensors; its logits are the reference page's formula."""
        ratio = self.calibration.ratio("recompute_memory")
        rows = self.training.recompute_micro_batch_size
        tokens = rows * -(-self.max_model_len // layout.cp)
        return {
            "activations": round(ratio * tokens * self._layer_bytes_per_token(layout.tp)),
            "recompute-logprobs temporaries": round(
                ratio * tokens * self._logits_bytes_per_token(layout.tp)
            ),
        }

    def _logits_bytes_per_token(self, tp: int) -> float:
        vocabulary_bytes = self.planner.memory_budget_logits_dtype_bytes * self.arch.vocab_size / tp
        return vocabulary_bytes * self.planner.memory_budget_workspace_factor

    def _kept_bytes_per_token_layer(self, tp: int) -> float:
        if self.megatron.megatron_recompute_granularity == "full":
            sharing = tp if self.megatron.megatron_sequence_parallel else 1
            return self.arch.hidden_size * self._dtype_bytes / sharing
        return self._layer_bytes_per_token(tp)

    def _layer_bytes_per_token(self, tp: int) -> float:
        """Tensors of one block kept for its backward pass.

        Flash attention keeps no score matrix, so selective recompute has nothing to drop. Split by
        TP: q, k, v and their rotated copies, attention output, gate and up, their product. Whole on
        every rank unless sequence parallel: two norms' inputs and outputs.
        """
        hidden, query = self.arch.hidden_size, attention_width(self.arch)
        key_value = key_value_width(self.arch)
        split = 3 * query + 3 * key_value
        whole = 4 * hidden
        if self.arch.num_experts:
            routed = self.arch.num_experts_per_token
            # Dispatch and combine each keep a copy of every routed token.
            split += routed * 3 * self.arch.moe_intermediate_size
            whole += 2 * routed * hidden
        else:
            split += 3 * self.arch.intermediate_size
        if self.megatron.megatron_sequence_parallel:
            return (split + whole) / tp * self._dtype_bytes
        return (split / tp + whole) * self._dtype_bytes


class RolloutMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What the budget of a rollout worker depends on, apart from its TP degree.

    Capacity is `libra.models.kv_capacity`'s, so planner and scheduler count on the same cache.
    """

    arch: Architecture
    engine: EngineMemory
    max_model_len: int
    dtype_bytes: int

    def budget(self, tp: int) -> MemoryBudget:
        """Weights, reserve and the cache of one sequence of max_model_len: vLLM's own demand."""
        per_token = kv_bytes_per_token(self.arch, tp=tp, kv_dtype_bytes=self.dtype_bytes)
        return MemoryBudget(
            bytes_of={
                "weights": num_parameters(self.arch) * self.dtype_bytes // tp,
                "activation reserve": self.engine.activation_reserve_bytes,
                "KV cache of one sequence": self.max_model_len * per_token,
            },
            capacity_bytes=int(self.engine.device_bytes * self.engine.utilization_fraction),
        )

    def kv_capacity_tokens(self, tp: int) -> int:
        """Tokens the instance's cache holds; 0 when the weights leave no room."""
        return kv_capacity_tokens(
            self.arch,
            self.engine,
            tp=tp,
            weight_dtype_bytes=self.dtype_bytes,
            kv_dtype_bytes=self.dtype_bytes,
        )
