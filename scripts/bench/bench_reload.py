#!/usr/bin/env python3
"""What a batch of reloads costs beyond its slowest instance, as JSON.

    scripts/bench/bench_reload.py [--sizes 64,512] [--batches 5]
    scripts/bench/bench_reload.py --real MODEL [--real-sizes 1,2] [--only restart-serial]

Without --real: instances that are a delay each, through the real control state, loop, executor and
judge. `over_slowest` is the batch's time over that of its slowest instance (parallel), over the sum
of all (serial); `cpu_ms_per_instance` is this process's CPU time for asking, hearing and judging.

With --real: vLLM servers on this machine; weights on disk with both methods and both strategies,
and by transfer from this process (`--only transfer-parallel`).
After the batches in place, a stream on every server is interrupted by a reload of unchanged weights
with pause mode `keep`, and its tokens are compared with those of an unbroken one.
"""

# ruff: noqa: S311 - made-up delays need no secrets

import argparse
import json
import logging
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "supervisor"), str(ROOT / "tests/support")]

import anyio  # noqa: E402 - after the path is set
import numpy as np  # noqa: E402
import structlog  # noqa: E402
from reload_bed import RUN, Batch, Bed  # noqa: E402

from libra import clock  # noqa: E402
from libra.config.weights import WeightsConfig  # noqa: E402
from libra.ids import ChildId, Incarnation, InstanceId, PolicyVersion  # noqa: E402
from libra.storage.safetensors import write_safetensors  # noqa: E402
from libra.weights.manifest import TensorEntry  # noqa: E402
from libra.wire.instance import InstanceState, ReloadAck, ReloadRequest  # noqa: E402
from libra_supervisor.events import ChildReady, ChildStarted  # noqa: E402
from weight_dirs import describe_version  # noqa: E402

SLOWEST_S, FASTEST_S = 1.0, 0.2
MOST_OVER_SLOWEST = 1.15
MOST_CPU_MS = 1.0
NUM_SERIAL = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=sizes, default=(64, 512))
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--real", type=Path, metavar="MODEL")
    parser.add_argument("--real-sizes", type=sizes, default=(1, 2))
    parser.add_argument("--only", default="", help="METHOD-STRATEGY, of the real runs")
    options = parser.parse_args()
    # As in a run without --verbose; lines go to stderr so that stdout is JSON.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    if options.real is None:
        cases = simulated(options.sizes, options.batches)
    else:
        from reload_servers import real  # noqa: PLC0415 - only where servers are wanted

        cases = real(options.real, options.real_sizes, options.batches, options.only)
    results = {}
    for name, figures in cases:
        # A case may take many minutes: what is known is said, should the rest not come.
        print(json.dumps({name: figures}), file=sys.stderr, flush=True)
        results[name] = figures
    machine = {"machine": platform.machine(), "python": platform.python_version()}
    print(json.dumps({"bench": "reload", **machine, "results": results}, indent=1))
    if any(case.get("is_within_bounds") is False for case in results.values()):
        sys.exit(1)


def sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def simulated(counts: tuple[int, ...], num_batches: int) -> Iterator[tuple[str, dict[str, object]]]:
    cases = [(count, "parallel") for count in counts] + [(NUM_SERIAL, "serial")]
    for count, strategy in cases:
        batches = anyio.run(
            simulate, count, strategy, num_batches, backend_options={"use_uvloop": True}
        )
        figures = figures_of(batches, strategy)
        if strategy == "parallel":
            is_fast = figures["cpu_ms_per_instance"] <= MOST_CPU_MS
            is_near = figures["over_slowest"]["median"] <= MOST_OVER_SLOWEST
            figures["is_within_bounds"] = is_fast and is_near
        yield f"simulated-{count}-{strategy}", figures


def figures_of(batches: list[Batch], strategy: str) -> dict[str, object]:
    """Medians over the batches, and the worst where a bound is on it."""
    if not all(batch.record.outcome == "committed" for batch in batches):
        raise RuntimeError(f"a batch failed: {[batch.record.outcome for batch in batches]}")
    ideal = sum if strategy == "serial" else max
    ideals = [ideal(ack.total_s for ack in batch.record.acks) for batch in batches]
    ratios = [batch.record.total_s / best for batch, best in zip(batches, ideals, strict=True)]
    cpu_ms = [1e3 * batch.cpu_s / len(batch.record.acks) for batch in batches]
    return {
        "num_instances": len(batches[0].record.acks),
        "num_batches": len(batches),
        "batch_s": round(median(batch.record.total_s for batch in batches), 4),
        "slowest_s": round(median(batch.record.slowest_total_s for batch in batches), 4),
        "over_slowest": {"median": round(median(ratios), 4), "worst": round(max(ratios), 4)},
        "cpu_ms_per_instance": round(median(cpu_ms), 4),
    }


async def simulate(count: int, strategy: str, num_batches: int) -> list[Batch]:
    with tempfile.TemporaryDirectory(prefix="libra-bench-") as root:
        ids = [InstanceId(f"vllm-{k}") for k in range(count)]
        weights = WeightsConfig(rollout_weight_reload_strategy=strategy)
        bed = Bed(Path(root), weights, [(i, 1) for i in ids], publish_tiny, num_batches=num_batches)
        engines = DelayedEngines(ids, Random(count))
        for number, instance_id in enumerate(ids):
            child, incarnation = ChildId(instance_id), engines.incarnation_of(instance_id)
            await bed.inbox.post(ChildStarted(child, number + 1, 1, incarnation, 0.0))
            await bed.inbox.post(ChildReady(child, incarnation, 0.0, 0.0))
        return await bed.run(engines)


def publish_tiny(directory: Path, version: PolicyVersion) -> str:
    directory.mkdir(parents=True)
    entry = TensorEntry(name="x", dtype="F32", shape=(64,), file="model.safetensors")
    content = memoryview(np.full(64, float(version), np.float32).view(np.uint8))
    write_safetensors(directory / entry.file, [entry], [content])
    return describe_version(directory, version, run_id=RUN)


class DelayedEngines:
    """`libra_supervisor.ports.Engines`: a reload is a wait; the slowest takes SLOWEST_S."""

    def __init__(self, ids: list[InstanceId], rng: Random) -> None:
        self._delay_of = {i: rng.uniform(FASTEST_S, SLOWEST_S) for i in ids}
        self._delay_of[rng.choice(ids)] = SLOWEST_S

    def incarnation_of(self, instance_id: InstanceId) -> Incarnation:
        return Incarnation(f"{instance_id}-first")

    async def ask_state(self, instance_id: InstanceId) -> InstanceState:
        return InstanceState(
            instance_id=instance_id,
            incarnation=self.incarnation_of(instance_id),
            run_id=RUN,
            policy_version=PolicyVersion(0),
            is_paused=False,
            manifest_hash=None,
        )

    async def ask_kv_capacity(self, instance_id: InstanceId) -> int | None:
        del instance_id

    async def reload(self, instance_id: InstanceId, request: ReloadRequest) -> ReloadAck:
        began_at = clock.now()
        await clock.sleep(self._delay_of[instance_id])
        total_s = clock.now() - began_at
        return ReloadAck(
            instance_id=instance_id,
            incarnation=self.incarnation_of(instance_id),
            run_id=request.run_id,
            nonce=request.nonce,
            policy_version=request.policy_version,
            method="inplace",
            strategy=request.strategy,
            lock_wait_s=0.0,
            process_stop_s=0.0,
            model_load_s=total_s,
            total_s=total_s,
            manifest_hash=request.manifest_hash,
            verified=("manifest", "files", "load", "probe"),
            probe_logprobs=tuple(-1.0 for _ in request.probe_token_ids[1:]),
        )

    def url_of(self, instance_id: InstanceId) -> str:
        return f"http://{instance_id}"

    def loading_directories(self) -> frozenset[Path]:
        return frozenset()

    def replace(self, instance_id: InstanceId, reason: str) -> None:
        raise RuntimeError(f"{instance_id} was to be replaced: {reason}")


if __name__ == "__main__":
    main()
