"""What a GPU achieves, as against what its data sheet says."""

import msgspec

from libra.config.hardware import HardwareConfig

# Shares of the data-sheet rate. Matrix products: Megatron-Core on one H200, where one token more
# of a 1.78 B model costs 23.3 us, half the bfloat16 peak with the logits' traffic (decision 0008).
# NCCL's share is the usual bus bandwidth of a large all-reduce. Calibration corrects all of them.
_MATMUL_SHARE = 0.48
_PREFILL_SHARE = 0.55
_MEMORY_SHARE = 0.75
_LINK_SHARE = 0.75
_FLOAT32_RATE = 1 / 16
"""Plain float32 against bfloat16 tensor cores: A100 19.5 of 312, H100 67 of 989 TFLOP/s."""

_INTRA_NODE_LATENCY_S = 12e-6
_INTER_NODE_LATENCY_S = 30e-6


class DeviceRates(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU and its links, in rates that a long kernel reaches."""

    memory_bytes: int
    train_flops: float
    prefill_flops: float
    memory_bytes_per_s: float
    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    gpus_per_node: int
    nodes: int

    def link_bytes_per_s(self, span_gpus: int) -> float:
        """The slowest link of a group whose ranks lie within `span_gpus` consecutive GPUs."""
        if span_gpus <= self.gpus_per_node:
            return self.intra_node_bytes_per_s
        return self.inter_node_bytes_per_s

    def link_latency_s(self, span_gpus: int) -> float:
        """Time of one small collective in such a group."""
        if span_gpus <= self.gpus_per_node:
            return _INTRA_NODE_LATENCY_S
        return _INTER_NODE_LATENCY_S


def device_rates(hardware: HardwareConfig, *, dtype_bytes: int = 2) -> DeviceRates:
    """`dtype_bytes` 4 means float32 products, which tensor cores do not speed up."""
    peak = hardware.dense_bf16_flops * (1.0 if dtype_bytes == 2 else _FLOAT32_RATE)  # noqa: PLR2004
    return DeviceRates(
        memory_bytes=hardware.memory_bytes,
        train_flops=peak * _MATMUL_SHARE,
        prefill_flops=peak * _PREFILL_SHARE,
        memory_bytes_per_s=hardware.memory_bandwidth_bytes_per_s * _MEMORY_SHARE,
        intra_node_bytes_per_s=hardware.intra_node_bandwidth_bytes_per_s * _LINK_SHARE,
        inter_node_bytes_per_s=hardware.inter_node_bandwidth_bytes_per_s * _LINK_SHARE,
        gpus_per_node=hardware.gpus_per_node,
        nodes=hardware.nodes,
    )
