"""`python -m libra.trainer.export`: a checkpoint's weights in Hugging Face format.

One process on the CPU, whatever layout and device wrote the checkpoint: it needs room for the model
and its optimizer once, and no GPU.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from libra.config.load import load_resolved
from libra.config.run import RunConfig
from libra.config.training import MegatronConfig
from libra.errors import LibraError
from libra.ids import PolicyVersion, RunId
from libra.wire.rank import ExportWeights

TIMEOUT_S = 3600.0
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    # Nobody else is going to ask for it.
    "MASTER_PORT": "0",
    "CUDA_VISIBLE_DEVICES": "",
}


def main(arguments: Sequence[str]) -> int:
    """Write the weights; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m libra.trainer.export", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.resolved.json")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a directory that is not there yet")
    parser.add_argument("--run-id", required=True, help="that the manifest names")
    options = parser.parse_args(arguments)
    try:
        _export(alone(load_resolved(options.config)), options)
    except LibraError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def alone(config: RunConfig) -> RunConfig:
    """`config` for one process on the CPU that scores and exports, and does not train."""
    return replace(
        config,
        control=replace(config.control, device="cpu"),
        training=replace(
            config.training,
            train_gpus=1,
            train_tp_size=1,
            train_pp_size=1,
            train_cp_size=1,
            train_ep_size=1,
        ),
        megatron=MegatronConfig(),
        algorithm=replace(config.algorithm, kl_coefficient=0.0),
        global_resource_planner=replace(
            config.global_resource_planner, memory_budget_dry_run_enabled=False
        ),
    )


def _export(config: RunConfig, options: argparse.Namespace) -> None:
    # Before torch looks at it.
    os.environ.update(ALONE)  # noqa: TID251 - the process's entry
    has_megatron = config.training.train_backend == "megatron_core"
    if has_megatron:
        warnings.filterwarnings("ignore", module=r"megatron\.")
        from libra.trainer import cpu_path

        cpu_path.enable()
    from libra.trainer.assembly import assemble
    from libra.trainer.checkpoint import restore_weights
    from libra.trainer.layout import coordinates, parallel_sizes
    from libra.trainer.publish import export_weights
    from libra.trainer.world import choose_device, join_world, leave_world

    sizes = parallel_sizes(config.training, world_size=1)
    at = coordinates(sizes, rank=0, local_rank=0)
    device = choose_device("cpu", local_rank=0)
    world = join_world(sizes, at, device, timeout_s=TIMEOUT_S, has_megatron=has_megatron)
    try:
        trainer = assemble(config, world, beat=lambda _step, _phase: None)
        step = restore_weights(trainer, options.checkpoint)
        command = ExportWeights(
            run_id=RunId(options.run_id),
            policy_version=PolicyVersion(step),
            directory=str(options.out),
            probe_token_ids=(),
        )
        export_weights(trainer, command)
    finally:
        leave_world()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
