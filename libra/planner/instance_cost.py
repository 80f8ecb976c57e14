"""Coefficients of a vLLM instance, from the model, the device and what was measured."""

import msgspec

from libra.config.model_arch import ModelArchConfig
from libra.models.flops import (
    head_token_flops,
    layer_attention_flops_per_square_token,
    layer_token_flops,
)
from libra.models.hardware import DeviceRates
from libra.models.kv_capacity import kv_bytes_per_token
from libra.models.parameters import embedding_parameters, expert_parameters, layer_parameters
from libra.planner.calibration import Calibration
from libra.planner.memory import RolloutMemory
from libra.planner.rollout_cost import InstanceCost

_STEP_S = 1.5e-3
"""vLLM's scheduler, sampler and output hand-over per decode step."""

_LAYER_STEP_S = 40e-6
"""Gaps between the kernels of one block inside a CUDA graph, per decode step."""

_SEQUENCE_STEP_S = 10e-6
"""Host work for one sequence in one decode step: block table, sampling, detokenising."""

_API_TOKEN_S = 1 / 11_700
"""One API server process with token ids and logprobs in its answers, measured with vLLM 0.22 on
one H200: 11.7 k tokens/s at 256 concurrent requests, and no more at 512."""

_CACHE_SHARE = 0.95
"""Part of the KV cache that a full instance really uses: the last block of each sequence is part
empty, and some room is kept free against preemption."""


class InstanceModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the cost of an instance depends on, apart from its TP degree."""

    arch: ModelArchConfig
    rates: DeviceRates
    memory: RolloutMemory
    calibration: Calibration
    max_sequences: int

    def cost(self, tp: int) -> InstanceCost:
        decode = self.calibration.ratio("rollout_decode")
        prefill = self.calibration.ratio("rollout_prefill")
        dtype_bytes = self.memory.dtype_bytes
        bandwidth = self.rates.memory_bytes_per_s
        expert_s = self._expert_bytes_per_sequence / tp / bandwidth
        num_expert_sequences = self._num_expert_sequences
        weights_s = (self._shared_parameters / tp) * dtype_bytes / bandwidth
        flops = self.arch.num_layers * layer_token_flops(self.arch) + head_token_flops(self.arch)
        compute_s = flops / tp / self.rates.prefill_flops
        full_read_s = weights_s + expert_s * num_expert_sequences
        return InstanceCost(
            tp=tp,
            step_s=decode * (_STEP_S + self.arch.num_layers * self._layer_step_s(tp)),
            weights_s=decode * weights_s,
            expert_s=decode * expert_s,
            num_expert_sequences=num_expert_sequences,
            compute_s=decode * compute_s,
            num_free_sequences=int(full_read_s / compute_s),
            token_s=decode * (_SEQUENCE_STEP_S + self._collective_token_s(tp)),
            cached_token_s=decode
            * kv_bytes_per_token(self.memory.arch, tp=tp, kv_dtype_bytes=dtype_bytes)
            / bandwidth,
            prompt_token_s=prefill * (compute_s + self._collective_token_s(tp)),
            prompt_square_s=prefill
            * self.arch.num_layers
            * layer_attention_flops_per_square_token(self.arch)
            / tp
            / self.rates.prefill_flops,
            api_token_s=decode * _API_TOKEN_S,
            capacity_tokens=max(1, int(self.memory.kv_capacity_tokens(tp) * _CACHE_SHARE)),
            max_sequences=self.max_sequences,
        )

    @property
    def _shared_parameters(self) -> int:
        """Read in every decode step: all but routed experts and embedding rows."""
        layer = layer_parameters(self.arch)
        blocks = self.arch.num_layers * (layer.sharded + layer.replicated)
        return blocks + embedding_parameters(self.arch)

    @property
    def _expert_bytes_per_sequence(self) -> int:
        if not self.arch.num_experts:
            return 0
        routed = self.arch.num_experts_per_token * expert_parameters(self.arch)
        return self.arch.num_layers * routed * self.memory.dtype_bytes

    @property
    def _num_expert_sequences(self) -> int:
        if not self.arch.num_experts:
            return 0
        return -(-self.arch.num_experts // self.arch.num_experts_per_token)

    def _layer_step_s(self, tp: int) -> float:
        """Two all-reduces per block when the block is split."""
        return _LAYER_STEP_S + (2 * self.rates.link_latency_s(tp) if tp > 1 else 0.0)

    def _collective_token_s(self, tp: int) -> float:
        volume = 2 * self.arch.hidden_size * self.memory.dtype_bytes * 2 * (tp - 1) / tp
        return self.arch.num_layers * volume / self.rates.link_bytes_per_s(tp)
