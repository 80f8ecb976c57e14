"""The main job as a user starts it, with real parts, and what tests ask about it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


class Job:
    """One `libra-supervisor run` as a child of this test."""

    def __init__(
        self,
        run_dir: Path,
        quickstart: Path,
        *arguments: str,
        verb: tuple[str | Path, ...] = ("run",),
        program: tuple[str | Path, ...] = ("-m", "libra_supervisor.cli"),
    ) -> None:
        self.run_dir = run_dir
        self.log = run_dir.with_suffix(".out")
        command = [
            *(sys.executable, *program, *verb),
            *(str(ROOT / "configs/quickstart.yaml"), "--run-dir", str(run_dir)),
            *("-o", f"model_path={quickstart / 'model'}"),
            *("-o", f"train_data={quickstart / 'train.jsonl'}"),
            *arguments,
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=run_dir.parent)

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.said()}") from None

    def said(self) -> str:
        return self.log.read_text()[-6000:]

    def kill(self, *, but: str = "") -> list[psutil.Process]:
        """SIGKILL the supervisor and what it started, at one moment; returns those left alive."""
        found = tagged_processes(self.run_dir)
        spared = [process for process in found if but and but in " ".join(process.cmdline())]
        tagged = [process for process in found if process not in spared]
        self.process.kill()
        for process in tagged:
            process.kill()
        self.process.wait()
        return spared

    def steps(self) -> list[dict]:
        return read_lines(self.run_dir / "metrics.jsonl")

    def until_step(self, step: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(line["step"] >= step for line in self.steps()):
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)


def read_lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def tagged_processes(run_dir: Path) -> list[psutil.Process]:
    """Processes that carry this run's tag in their environment."""
    state = run_dir / "state.json"
    run_id = json.loads(state.read_text())["run_id"] if state.exists() else run_dir.name
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LIBRA_RUN_ID") == run_id:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def servers(run_dir: Path) -> dict[int, str]:
    """Instance by pid, of the API servers and of the processes inside them."""
    found = {}
    for process in tagged_processes(run_dir):
        try:
            child = process.environ()["LIBRA_CHILD_ID"]
        except psutil.NoSuchProcess:
            continue
        if child.startswith("vllm"):
            found[process.pid] = child
    return found
