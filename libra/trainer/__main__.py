"""`python -m libra.trainer`: one rank, started by torchrun under the supervisor.

Nothing heavy is imported before `main` runs: Megatron's checkpoints start a helper process that
imports this module again, and the supervisor should hear from the rank before torch is loaded.
"""

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from libra.config.load import current_environ, load_resolved
from libra.config.run import RunConfig
from libra.errors import LibraError
from libra.ids import RunId
from libra.storage.lease_file import LEASE_VARIABLE
from libra.tracing.span import SpanWriter, trace_path
from libra.trainer.identity import LOOPBACK, RankIdentity, hello
from libra.trainer.layout import coordinates, parallel_sizes
from libra.trainer.lease_watch import watch_lease
from libra.trainer.link import Link
from libra.trainer.rank_lines import mark_output
from libra.wire.rank import RankFailed

EXIT_FAILED = 4


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one rank to its end; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m libra.trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.resolved.json")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--restore", type=Path, help="directory of a complete checkpoint")
    parser.add_argument("--probe", action="store_true", help="probe, whatever is restored")
    parser.add_argument("--replica", default="", help="name of the hybrid replica, if it is one")
    parser.add_argument("--waits", action="store_true", help="use no device before TakeDevice")
    options = parser.parse_args(arguments)
    rank = int(environment["RANK"])
    link = None
    try:
        if lease := environment.get(LEASE_VARIABLE):
            watch_lease(Path(lease))
        config = load_resolved(options.config)
        link = Link(Path(environment["LIBRA_CONTROL"]))
        _run(config, options, environment, link)
    except Exception as error:  # noqa: BLE001 - the top of the process
        traceback.print_exc()
        code = error.exit_code if isinstance(error, LibraError) else EXIT_FAILED
        _last_words(link, RankFailed(rank=rank, exit_code=code, message=_in_words(error)))
        return code
    return 0


def _run(
    config: RunConfig, options: argparse.Namespace, environment: Mapping[str, str], link: Link
) -> None:
    world_size = int(environment["WORLD_SIZE"])
    sizes = parallel_sizes(config.training, world_size=world_size)
    at = coordinates(
        sizes, rank=int(environment["RANK"]), local_rank=int(environment["LOCAL_RANK"])
    )
    bind_to_device(environment.get("LIBRA_RANK_CORES", ""), at.local_rank)
    identity = RankIdentity(
        run_id=RunId(environment["LIBRA_RUN_ID"]),
        attempt=int(environment["LIBRA_ATTEMPT"]),
        sizes=sizes,
        at=at,
        gang=environment["LIBRA_GANG"],
        writer=environment["LIBRA_ATTEMPT_ID"],
        host=environment.get("LIBRA_RANK_0_HOST", LOOPBACK),
    )
    link.send_output(hello(identity, world_size=world_size))
    if config.control.device == "cpu":
        # Hidden before torch looks: Megatron would use a GPU that it can see.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # noqa: TID251
    if config.training.train_backend == "megatron_core":
        # Megatron warns at import about every optional package that is not there.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        from libra.trainer import cpu_path

        cpu_path.enable()
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    from libra.trainer.rank import run_rank
    from libra.trainer.world import leave_world

    if options.waits:
        from libra.trainer.warm_start import until_device

        if not until_device(config, link, rank=at.rank):
            return
    spans = _span_writer(config, options, identity)
    is_replica = bool(options.replica)
    probing = config.global_resource_planner.memory_budget_dry_run_enabled
    run_rank(
        config,
        identity,
        link,
        spans,
        checkpoints=options.run_dir / "checkpoints",
        restore=options.restore,
        is_replica=is_replica,
        # What is restored was trained with this layout before, unless the layout was forced.
        probes=options.probe or (probing and options.restore is None),
    )
    spans.close()
    leave_world()


def bind_to_device(cores_of_ranks: str, local_rank: int) -> None:
    """Run on the cores beside this rank's device: `0,1;2,3` are those of ranks 0 and 1."""
    cores = cores_of_ranks.split(";")[local_rank] if cores_of_ranks else ""
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))


def _span_writer(
    config: RunConfig, options: argparse.Namespace, identity: RankIdentity
) -> SpanWriter:
    """The rank's phase trace; one that writes nothing when traces are off."""
    tracing, rank = config.tracing, identity.at.rank
    directory = Path(tracing.phase_trace_dir or options.run_dir / "phase_trace") / options.replica
    return SpanWriter(
        trace_path(directory, rank) if tracing.phase_trace_enabled else None,
        rank=rank,
        run_id=identity.run_id,
        attempt=identity.attempt,
        max_bytes=tracing.phase_trace_max_bytes,
        num_kept=tracing.phase_trace_keep,
    )


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, LibraError) else f"{type(error).__name__}: {error}"


def _last_words(link: Link | None, event: RankFailed) -> None:
    if link is None:
        return
    try:
        link.send(event)
    except LibraError as error:
        print(f"could not tell the supervisor: {error}", flush=True)  # noqa: T201


if __name__ == "__main__":
    # Without interpreter shutdown: a peer that died leaves NCCL and gloo threads that never end.
    started_with = current_environ()
    mark_output(int(started_with["RANK"]))
    code = main(sys.argv[1:], started_with)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
