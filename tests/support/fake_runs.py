"""Whole runs as a user starts them, on fake servers and ranks: `children/fake_run.py`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from config_files import TINY_MODEL
from libra_supervisor.journal import StateFile
from libra_supervisor.process.kernel import read_table, read_tag
from processes import CHILDREN
from tiny_models import make_tiny_model
from tokenizer_dirs import write_tokenizer
from weight_dirs import tiny_tensors, write_tensors

SUPPORT = Path(__file__).parent
REPOSITORY = SUPPORT.parents[1]
CONFIG = """
model_path: {model}
train_data: {data}
reward: character_class
device: cpu
train_gpus: {train_gpus}
rollout_gpus: 2
heterogeneous_rollout:
  instances: [{{tp: 1, count: 2}}]
train_dtype: float32
save_interval: 2
batch_size: 8
n_samples: 4
max_model_len: 64
max_new_tokens: 8
max_concurrent_rollouts: 16
reward_workers: 1
supervision: {{term_grace_s: 2, kill_wait_s: 5, restart_backoff_initial_s: 0.1}}
"""


def write_config(folder: Path, **options: object) -> Path:
    """Write a model, data and a configuration below `folder`; options are added at its end."""
    model = write_tokenizer(folder / "model")
    (model / "config.json").write_text(json.dumps(TINY_MODEL))
    write_tensors(model / "model.safetensors", tiny_tensors(1))
    data = folder / "train.jsonl"
    words = ("digits", "capitals", "letters", "symbols")
    data.write_text("".join(f'{{"prompt": "{word}", "answer": "{word}"}}\n' for word in words))
    path = folder / "run.yaml"
    train_gpus = options.pop("train_gpus", 2)
    lines = [f"{key}: {_yaml(value)}" for key, value in options.items()]
    path.write_text(
        CONFIG.format(model=model, data=data, train_gpus=train_gpus) + "\n".join(lines) + "\n"
    )
    return path


def _yaml(value: object) -> str:
    return ".inf" if value == float("inf") else json.dumps(value)


class FakeRun:
    """One run directory; `start` may be called again after its supervisor has ended."""

    def __init__(self, folder: Path, *, has_real_trainer: bool = False, **options: object) -> None:
        """`has_real_trainer`: Megatron under torchrun, on a model that it can train."""
        self.config = write_config(folder, **{"total_steps": 1000, **options})
        self.run_dir = folder / "run"
        self.out = folder / "run.out"
        path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "supervisor", SUPPORT)))
        # Without what other runs of this machine have measured.
        self.env = {**os.environ, "PYTHONPATH": path, "XDG_DATA_HOME": str(folder / "data")}
        if has_real_trainer:
            self.env["FAKE_RUN_TRAINER"] = "real"
            made = make_tiny_model(folder / "trained", "qwen3")
            for name in ("config.json", "model.safetensors"):
                (made / name).rename(folder / "model" / name)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *arguments: str) -> None:
        argv = [sys.executable, str(CHILDREN / "fake_run.py"), "run", str(self.config)]
        argv += ["--run-dir", str(self.run_dir), *arguments]
        with self.out.open("ab") as out:
            self.process = subprocess.Popen(
                argv, env=self.env, stdout=out, stderr=out, cwd=self.run_dir.parent
            )

    def argv(self, *arguments: str) -> list[str]:
        """The command line itself: what is faked concerns the verb run alone."""
        return [sys.executable, "-m", "libra_supervisor.cli", *arguments]

    def call(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A verb of the command line on this run."""
        return self.call_bare(verb, *arguments, "--run-dir", str(self.run_dir))

    def call_bare(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = self.argv(*arguments)
        return subprocess.run(
            argv, env=self.env, capture_output=True, text=True, timeout=120, check=False
        )

    def status(self) -> dict:
        done = self.call("status", "--json")
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def steps(self) -> list[int]:
        return [line["step"] for line in read_lines(self.run_dir / "metrics.jsonl")]

    def journal(self, name: str) -> list[dict]:
        entries = read_lines(self.run_dir / "journal.jsonl")
        return [entry for entry in entries if entry["name"] == name]

    def said(self, event: str) -> list[dict]:
        """Lines of the control log."""
        entries = read_lines(self.run_dir / "logs" / "control.jsonl")
        return [entry for entry in entries if entry["event"] == event]

    def pids(self, role: str = "") -> dict[int, str]:
        """Live processes with this run's tag: child by pid."""
        state = StateFile(self.run_dir / "state.json").load()
        if state is None:
            return {}
        tags = {pid: read_tag(pid) for pid, row in read_table().items() if not row.is_dead}
        return {
            pid: tag[1]
            for pid, tag in tags.items()
            if tag is not None and tag[0] == state.run_id and tag[1].startswith(role)
        }

    def until_step(self, step: int, *, within_s: float = 120) -> None:
        self.until(lambda: any(it >= step for it in self.steps()), within_s=within_s)

    def until(self, condition, *, within_s: float = 120):
        deadline = time.monotonic() + within_s
        while not (value := condition()):
            assert self.process is None or self.process.poll() is None, self.tail()
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.05)
        return value

    def kill(self) -> None:
        """SIGKILL the supervisor alone."""
        self.process.kill()
        self.process.wait()
        self.process = None

    def wait(self, timeout_s: float = 60) -> int:
        code = self.process.wait(timeout_s)
        self.process = None
        return code

    def end(self) -> None:
        """Leave nothing, whatever the test did."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def tail(self) -> str:
        return self.out.read_text()[-5000:] if self.out.exists() else ""


def read_lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
