"""What the machines can do: `hardware`, or a file named by `hardware_config`."""

from libra.config.base import Config, PositiveCount, Rate


class HardwareConfig(Config, frozen=True, kw_only=True):
    """`hardware`: rates from the data sheet, per GPU and direction unless said otherwise."""

    device_name: str
    """Product name as the driver reports it, for people and for the calibration store."""

    memory_bytes: PositiveCount
    """Device memory of one GPU in bytes."""

    dense_bf16_flops: Rate
    """Peak dense bfloat16 FLOP/s of one GPU, without structured sparsity."""

    memory_bandwidth_bytes_per_s: Rate
    """Device memory bandwidth of one GPU in bytes/s."""

    intra_node_bandwidth_bytes_per_s: Rate
    """Link of one GPU to the others of its node (NVLink), bytes/s in one direction."""

    inter_node_bandwidth_bytes_per_s: Rate
    """Network of one GPU to other nodes, bytes/s in one direction."""

    gpus_per_node: PositiveCount = 8
    """GPUs in one node; a tensor-parallel group stays inside one."""

    nodes: PositiveCount = 1
    """Nodes of the cluster."""
