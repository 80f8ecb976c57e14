"""Seconds of one training step at a layout.

Compute is operations over reached rates, communication is bytes over links (ring collectives move
(n - 1) / n of the data once, an all-reduce twice), and both are added: nothing is assumed to
overlap. A pass is never faster than its kernels can be launched. Pipelining is simulated micro-
batch by micro-batch on the fullest data-parallel rank (libra.planner.pipeline).
"""

from functools import cached_property

import msgspec
import numpy as np

from libra.config.model_arch import ModelArchConfig
from libra.config.training import MegatronConfig, TrainingConfig
from libra.models.flops import (
    head_token_flops,
    layer_attention_flops_per_square_token,
    layer_token_flops,
)
from libra.models.hardware import DeviceRates
from libra.models.parameters import key_value_width, rank_parameters
from libra.planner.calibration import Calibration
from libra.planner.demand import Demand
from libra.planner.pipeline import (
    StageTimes,
    bubble_fraction,
    forward_only_s,
    one_forward_one_backward_s,
)
from libra.planner.train_layout import TrainLayout

_LAUNCH_S_PER_LAYER = 150e-6
"""Forward kernels of one block launched from Python, about 40 at 4 us; backward twice that."""

_LOGITS_PASSES = (3, 8)
"""Reads and writes of a float32 logits row in the forward pass, and in the backward pass, which
computes the row again."""

_HEAD_PRODUCTS = (1, 3)
"""Products of the output layer in the forward pass, and in the backward pass."""

_OPTIMIZER_BYTES = 110
"""Per parameter and step. A fused Adam would move 30; unfused, with zeroing, norm, clipping and
the copy to bfloat16, the measured 54 ms for 1.78 B parameters on an H200 are 110."""

_HOST_LINK_BYTES_PER_S = 25e9
"""PCIe generation 4, 16 lanes, as reached."""

_HOST_ADAM_PARAMETERS_PER_S = 1.0e9
_ROUNDING = 1 - 1e-9
"""Sums of the same times in another order may differ by this share."""

_BACKWARD = 2
"""A backward pass costs two forward passes."""


class TrainCost(msgspec.Struct, frozen=True, kw_only=True):
    """One training step, in the phases of the phase trace."""

    recompute_logprobs_s: float
    grpo_update_s: float
    """Forward, backward, gradient reduction and optimizer, over all mini-batches."""

    bubble_fraction: float

    @property
    def total_s(self) -> float:
        return self.recompute_logprobs_s + self.grpo_update_s


class TrainWork:
    """The sequences of one step, cut the way the batch is sharded."""

    def __init__(self, demand: Demand, *, mini_batch_size: int) -> None:
        lengths = np.array(demand.prompt_tokens) + np.array(demand.response_tokens)
        self._sorted = np.sort(lengths)[::-1].astype(np.float64)
        self.num_mini_batches = -(-len(lengths) // mini_batch_size)
        self._cut: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def micro_batches(self, dp: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, sum of squared lengths) of the fullest rank's micro-batches, with padding.

        One mini-batch takes every k-th sequence by length. Ranks get equal counts and nearly equal
        tokens: the sorted sequences are dealt out forth and back, which leaves rank 0 the fullest.
        Its rows are cut longest first, each micro-batch padded to its own longest row.
        """
        key = (dp, size)
        if key not in self._cut:
            mini_batch = self._sorted[:: self.num_mini_batches]
            rounds = np.arange(-(-len(mini_batch) // dp))
            dealt = rounds * dp + np.where(rounds % 2 == 0, 0, dp - 1)
            lengths = mini_batch[np.minimum(dealt, len(mini_batch) - 1)]
            starts = np.arange(0, len(lengths), size)
            rows = np.diff([*starts, len(lengths)])
            longest = lengths[starts]
            self._cut[key] = (rows * longest, rows * longest**2)
        return self._cut[key]


class TrainModel(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What the cost of training depends on, apart from layout and work."""

    arch: ModelArchConfig
    rates: DeviceRates
    training: TrainingConfig
    megatron: MegatronConfig
    calibration: Calibration
    has_reference: bool
    """A reference policy is scored too."""

    @cached_property
    def dtype_bytes(self) -> int:
        return 2 if self.training.train_dtype == "bfloat16" else 4

    def cost(self, layout: TrainLayout, work: TrainWork) -> TrainCost:
        tokens, squares = work.micro_batches(layout.dp, layout.micro_batch_size)
        stages = self._stages(layout, tokens, squares)
        update_s = one_forward_one_backward_s(stages) + self._step_end_s(layout)
        recompute_s, num_passes = 0.0, self._num_forward_only_passes(work)
        if num_passes:
            size = self.training.recompute_micro_batch_size
            rows = self._stages(layout, *work.micro_batches(layout.dp, size))
            recompute_s = forward_only_s([stage.forward_s for stage in rows])
        return TrainCost(
            recompute_logprobs_s=self.calibration.ratio("recompute_logprobs")
            * recompute_s
            * num_passes
            * work.num_mini_batches,
            grpo_update_s=self.calibration.ratio("grpo_update") * update_s * work.num_mini_batches,
            bubble_fraction=bubble_fraction(layout.pp, len(tokens)),
        )

    def _num_forward_only_passes(self, work: TrainWork) -> int:
        """With one mini-batch the update's own forward pass gives the old logprobs."""
        recomputes = self.training.recompute_logprobs and work.num_mini_batches > 1
        return int(recomputes) + int(self.has_reference)

    def lower_bound_s(self, layout: TrainLayout, work: TrainWork) -> float:
        """At most `cost(layout, work).total_s`: the last stage's busy time, the pipeline full."""
        tokens, squares = work.micro_batches(layout.dp, layout.micro_batch_size)
        forward, backward = self._pass_seconds(layout, tokens, squares, has_head=True)
        update_s = float((forward + backward).sum()) + self._step_end_s(layout)
        ratio = self.calibration.ratio("grpo_update") * _ROUNDING
        return ratio * update_s * work.num_mini_batches

    def tensor_comm_ratio(self, tp: int) -> float:
        """Seconds of TP collectives per second of computation, for one token of one block."""
        compute_s = layer_token_flops(self.arch) / tp / self.rates.train_flops
        return self._tensor_token_s(tp) / compute_s

    def expert_comm_ratio(self, tp: int, ep: int) -> float:
        """Seconds of expert all-to-all per second of computation, for one token of one block."""
        compute_s = layer_token_flops(self.arch) / tp / self.rates.train_flops
        return self._expert_token_s(tp, ep, tp * ep) / compute_s

    def _stages(
        self, layout: TrainLayout, tokens: np.ndarray, squares: np.ndarray
    ) -> list[StageTimes]:
        plain = self._pass_seconds(layout, tokens, squares, has_head=False)
        last = self._pass_seconds(layout, tokens, squares, has_head=True)
        per_stage = [plain] * (layout.pp - 1) + [last]
        return [StageTimes(forward_s=f.tolist(), backward_s=b.tolist()) for f, b in per_stage]

    def _pass_seconds(
        self, layout: TrainLayout, tokens: np.ndarray, squares: np.ndarray, *, has_head: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """(forward, backward) of every micro-batch on one stage."""
        layers = -(-self.arch.num_layers // layout.pp)
        sharing = layout.tp * layout.cp
        attention = layer_attention_flops_per_square_token(self.arch)
        flops = tokens * layer_token_flops(self.arch) + squares * attention
        compute_s = layers * flops / sharing / self.rates.train_flops
        comm_s = layers * self._layer_comm_s(layout, tokens / layout.cp)
        forward = compute_s + comm_s
        recomputes = self.megatron.megatron_recompute_granularity == "full"
        backward = compute_s * (_BACKWARD + recomputes) + comm_s * (1 + recomputes)
        if has_head:
            forward = forward + self._head_s(layout, tokens, direction=0)
            backward = backward + self._head_s(layout, tokens, direction=1)
        launch_s = layers * _LAUNCH_S_PER_LAYER
        hop_s = self._stage_hop_s(layout, tokens)
        return (
            np.maximum(forward, launch_s) + hop_s,
            np.maximum(backward, launch_s * (_BACKWARD + recomputes)) + hop_s,
        )

    def _head_s(self, layout: TrainLayout, tokens: np.ndarray, *, direction: int) -> np.ndarray:
        """The output layer and its logits' traffic; direction 0 is forward, 1 backward."""
        product_s = _HEAD_PRODUCTS[direction] * head_token_flops(self.arch) / self.rates.train_flops
        traffic = self.arch.vocab_size * 4 * _LOGITS_PASSES[direction]
        sharing = layout.tp * layout.cp
        return tokens / sharing * (product_s + traffic / self.rates.memory_bytes_per_s)

    def _layer_comm_s(self, layout: TrainLayout, tokens: np.ndarray) -> np.ndarray:
        """Collectives of one block in one direction; `tokens` are those of one CP rank."""
        seconds = tokens * self._tensor_token_s(layout.tp)
        if layout.tp > 1:
            seconds = seconds + 2 * self.rates.link_latency_s(layout.tp)
        if layout.ep > 1:
            seconds = seconds + tokens * self._expert_token_s(layout.tp, layout.ep, layout.ep_span)
            seconds = seconds + 2 * self.rates.link_latency_s(layout.ep_span)
        if layout.cp > 1:
            volume = 2 * key_value_width(self.arch) / layout.tp * self.dtype_bytes
            link = self.rates.link_bytes_per_s(layout.cp_span)
            seconds = seconds + tokens * volume * (layout.cp - 1) / link
            seconds = seconds + self.rates.link_latency_s(layout.cp_span)
        return seconds

    def _tensor_token_s(self, tp: int) -> float:
        """Two all-reduces of the residual stream per block and direction."""
        volume = 2 * self.arch.hidden_size * self.dtype_bytes * 2 * (tp - 1) / tp
        return volume / self.rates.link_bytes_per_s(tp)

    def _expert_token_s(self, tp: int, ep: int, span: int) -> float:
        """Dispatch and combine per block and direction; TP ranks share the tokens."""
        routed = self.arch.num_experts_per_token * self.arch.hidden_size * self.dtype_bytes
        return 2 * routed / tp * (ep - 1) / ep / self.rates.link_bytes_per_s(span)

    def _stage_hop_s(self, layout: TrainLayout, tokens: np.ndarray) -> np.ndarray:
        if layout.pp == 1:
            return np.zeros_like(tokens)
        link = self.rates.link_bytes_per_s(layout.num_gpus)
        volume = tokens / layout.cp * self.arch.hidden_size * self.dtype_bytes
        return volume / link + self.rates.link_latency_s(layout.num_gpus)

    def _step_end_s(self, layout: TrainLayout) -> float:
        """Gradient reduction, optimizer and, when distributed, the gather of new weights."""
        dense, experts = rank_parameters(self.arch, tp=layout.tp, pp=layout.pp, ep=layout.ep)
        group, expert_group = layout.cp * layout.dp, max(1, layout.cp * layout.dp // layout.ep)
        distributed = self.megatron.megatron_use_distributed_optimizer
        # An all-reduce of float32, or its scatter half and a gather of the training dtype.
        volume = 4 + self.dtype_bytes if distributed else 2 * 4
        moved = dense * (group - 1) / group + experts * (expert_group - 1) / expert_group
        seconds = moved * volume / self.rates.link_bytes_per_s(layout.dp_span)
        owned = dense / group + experts / expert_group if distributed else float(dense + experts)
        return seconds + self._optimizer_s(owned)

    def _optimizer_s(self, owned_parameters: float) -> float:
        offloaded = 0.0
        if self.megatron.megatron_optimizer_cpu_offload:
            offloaded = self.megatron.megatron_optimizer_offload_fraction * owned_parameters
        on_device = (owned_parameters - offloaded) * _OPTIMIZER_BYTES
        host_bytes = offloaded * (4 + self.dtype_bytes)
        return (
            on_device / self.rates.memory_bytes_per_s
            + host_bytes / _HOST_LINK_BYTES_PER_S
            + offloaded / _HOST_ADAM_PARAMETERS_PER_S
        )
