"""One real run whose plan an operator changes back and forth, and what each change took."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 900.0
SETTLED_STEPS = 4
"""Between two changes: what a step takes usually."""

BATCH_SIZE = 64
_NOT_READY = 8
_MICRO_BATCH = 2

PLANNER = "global_resource_planner"
TURN = {
    "instance leaves": ("--instances", "1x1"),
    "instance joins": ("--instances", "2x1"),
    "rollout to training": ("--instances", "1x1", "--hybrids", "1"),
    "training to rollout": ("--instances", "2x1", "--hybrids", "0"),
    "core grows to DP 2": ("--instances", "1x1", "--train-gpus", "2"),
    "core DP 2 to TP 2": ("--train-tp-size", "2"),
    "core shrinks to DP 1": ("--train-tp-size", "1", "--train-gpus", "1", "--instances", "2x1"),
}
"""Orders of one turn; each begins where the one before has led."""

LENT = "rollout to training"
LENDING = {name: TURN[name] for name in (LENT, "training to rollout")}
"""Of them those that lend a slot to a replica and give it back."""

LENDING_OF_LAST_SERVER = {
    LENT: ("--instances", "0", "--hybrids", "1"),
    "training to rollout": ("--instances", "1x1", "--hybrids", "0"),
}


class Job:
    """A core on one slot beside two servers, or beside one, whose slot is lent all the same."""

    def __init__(
        self,
        folder: Path,
        *,
        model: Path,
        tokenizer: Path,
        data: Path,
        options: Iterable[str],
        lead_batches: int = 0,
    ) -> None:
        """`lead_batches`: there is one server, lent when so many batches are ready; 0: two."""
        self._lead_batches = lead_batches
        num_servers = 1 if lead_batches else 2
        self.run_dir = folder / "run"
        self._metrics = Lines(self.run_dir / "metrics.jsonl")
        self._reconfigurations = Lines(self.run_dir / "reconfigurations.jsonl")
        self._log = folder / "run.out"
        paths = (ROOT, ROOT / "supervisor", os.environ.get("PYTHONPATH", ""))
        self._env = {**os.environ, "PYTHONPATH": ":".join(filter(None, map(str, paths)))}
        given = (
            *(f"model_path={model}", f"tokenizer_path={tokenizer}", f"train_data={data}"),
            *("train_gpus=1", f"rollout_gpus={num_servers}"),
            *("total_steps=100000", "save_interval=0", f"batch_size={BATCH_SIZE}"),
            f"heterogeneous_rollout.instances=[{{tp: 1, count: {num_servers}}}]",
            *(ahead(lead_batches) if lead_batches else ()),
            f"{PLANNER}.runtime_dynamic_reconfiguration_enabled=true",
            f"{PLANNER}.runtime_reconfigure_training=true",
            f"{PLANNER}.runtime_cluster_swap_enabled=true",
            *options,
        )
        config = ROOT / "configs/quickstart.yaml"
        argv = self._verb("run", str(config), "--run-dir", str(self.run_dir))
        argv += [part for option in given for part in ("-o", option)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(argv, env=self._env, stdout=log, stderr=log)

    def measure(
        self, orders: Mapping[str, tuple[str, ...]], *, num_turns: int
    ) -> dict[str, list[dict[str, Any]]]:
        """What each of these orders took, by its name, in every turn."""
        self._until(lambda: self._steps()[SETTLED_STEPS - 1 :])
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for turn in range(num_turns):
            for name, order in orders.items():
                if self._lead_batches and name == LENT:
                    self._until_ahead()
                sys.stderr.write(f"turn {turn + 1}: {name}\n")
                found[name].append(self._change(order))
        return dict(found)

    def end(self) -> None:
        if self._process.poll() is None:
            subprocess.run(
                self._verb("stop", "--run-dir", str(self.run_dir)), env=self._env, check=False
            )
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(120)

    def _until_ahead(self) -> None:
        wanted = self._lead_batches * BATCH_SIZE

        def ahead() -> list[dict[str, Any]]:
            status = self._status()
            return [status] if status.get("num_buffered", 0) >= wanted else []

        self._until(ahead)

    def _status(self) -> dict[str, Any]:
        argv = self._verb("status", "--json", "--run-dir", str(self.run_dir))
        done = subprocess.run(argv, env=self._env, capture_output=True, text=True, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def _change(self, order: tuple[str, ...]) -> dict[str, Any]:
        before, num_changes = self._steps(), len(self._changes())
        argv = self._verb("replan", *order, "--run-dir", str(self.run_dir))
        done = subprocess.run(argv, env=self._env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"replan {' '.join(order)}: {done.stderr}")
        change = self._until(lambda: self._changes()[num_changes:])[0]
        if change["outcome"] != "done":
            raise SystemExit(f"replan {' '.join(order)}: {change['outcome']}: {change['reason']}")
        ended_at = change["wall_time_ns"]
        self._until(lambda: [it for it in self._steps() if began_at(it) > ended_at][SETTLED_STEPS:])
        return summary(change, self._steps(), usual=before[-SETTLED_STEPS:])

    def _verb(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "libra_supervisor.cli", *arguments]

    def _steps(self) -> list[dict[str, Any]]:
        return self._metrics.all()

    def _changes(self) -> list[dict[str, Any]]:
        return [it for it in self._reconfigurations.all() if it["kind"] == "reconfiguration"]

    def _until(self, found: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        deadline = time.monotonic() + WITHIN_S
        while not (value := found()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(self._log.read_text()[-5000:])
            time.sleep(0.1)
        return value


def summary(
    change: Mapping[str, Any],
    steps: list[dict[str, Any]],
    *,
    usual: list[dict[str, Any]],
) -> dict[str, Any]:
    """One change beside the steps that it fell into, and what a step took before it.

    `stalled_step_s`: the trainer was held, or waited for rollouts longer than usually.
    `beyond_usual_s`: what lies between the end of the last step before the change and that of the
    first after it, less what so many steps take usually. The time that the trainer is held in is no
    step's.
    """
    ended_at = change["wall_time_ns"]
    begun_at = ended_at - int(change["total_s"] * 1e9)
    before = [it["wall_time_ns"] for it in steps if it["wall_time_ns"] <= begun_at]
    after = [it["wall_time_ns"] for it in steps if began_at(it) >= ended_at]
    inside = [it for it in steps if before[-1] < it["wall_time_ns"] <= after[0]]
    step_s = statistics.median(it["step_s"] for it in usual)
    wait_s = statistics.median(it["rollout_wait_s"] for it in usual)
    beyond_s = (after[0] - before[-1]) / 1e9 - len(inside) * step_s
    waited_s = sum(it["rollout_wait_s"] - wait_s for it in inside)
    return {
        "switch_s": change["total_s"],
        "phases_s": change["phases"],
        "stages_s": by_kind(change["stages"]),
        "stalled_step_s": change["stalled_s"] + max(0.0, waited_s),
        "trainer_held_s": change["stalled_s"],
        "num_steps_inside": len(inside),
        "usual_step_s": step_s,
        "beyond_usual_s": beyond_s,
        "waited_for_rollouts_s": waited_s,
        "waited_for_rollouts_in_s": waited_in(change["phases"], inside, begun_at=begun_at),
        "steps_lost": max(0.0, beyond_s) / step_s,
    }


def ahead(lead_batches: int) -> tuple[str, ...]:
    """Options with which rollouts may be so far ahead, and the last server may be lent then."""
    # What is in flight or being trained counts too, and is not ready.
    most = lead_batches + _NOT_READY
    return (
        f"max_head_offpolicyness={most}",
        f"max_concurrent_rollouts={most * BATCH_SIZE}",
        # Steps that the lead outlasts a replica's start with, also of a small model.
        *(f"micro_batch_size={_MICRO_BATCH}", f"recompute_micro_batch_size={_MICRO_BATCH}"),
        f"{PLANNER}.elastic_hybrid_min_rollout_gpus=0",
    )


def waited_in(
    phases: Mapping[str, float], steps: Iterable[Mapping[str, Any]], *, begun_at: int
) -> dict[str, float]:
    """How long the trainer waited for rollouts, by the phase of the change that this was in.

    Phases follow one after the other, which they do where each comes once; `after` is after all.
    """
    found = dict.fromkeys((*phases, "after"), 0.0)
    for step in steps:
        since_s = (began_at(step) - begun_at) / 1e9
        until_s, start_s = since_s + step["rollout_wait_s"], 0.0
        for phase, spent_s in (*phases.items(), ("after", float("inf"))):
            end_s = start_s + spent_s
            found[phase] += max(0.0, min(until_s, end_s) - max(since_s, start_s))
            start_s = end_s
    return found


def by_kind(stages: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """`server start`, `replica load`, ...: of children of a kind the slowest."""
    kinds = {"vllm": "server", "hybrid": "replica", "trainer": "trainer"}
    found: dict[str, float] = {}
    for child, spent in stages.items():
        for stage, seconds in spent.items():
            name = f"{kinds[child.partition('-')[0]]} {stage}"
            found[name] = max(seconds, found.get(name, 0.0))
    return found


def medians(turns: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Of every number, and of what is inside of what."""
    found: dict[str, Any] = {}
    for name in turns[0]:
        values = [turn[name] for turn in turns]
        if isinstance(values[0], Mapping):
            names = sorted({key for value in values for key in value})
            same = [{key: value.get(key, 0.0) for key in names} for value in values]
            found[name] = medians(same) if names else {}
        else:
            found[name] = round(statistics.median(values), 3)
    return found


def began_at(step: Mapping[str, Any]) -> int:
    return int(step["wall_time_ns"] - step["step_s"] * 1e9)


class Lines:
    """A file of JSON lines that grows; each line is read once, however often it is looked at."""

    def __init__(self, path: Path) -> None:
        self._path, self._read_bytes = path, 0
        self._found: list[dict[str, Any]] = []

    def all(self) -> list[dict[str, Any]]:
        """A copy of what is there, without a line that is being written."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read_bytes += len(whole) + 1
                self._found += map(json.loads, whole.splitlines())
        return list(self._found)
