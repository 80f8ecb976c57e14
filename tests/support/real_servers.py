"""Real vLLM servers as the supervisor starts them, for system tests."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import anyio

from libra import clock
from libra.config.model import ModelConfig
from libra.config.rollout import RolloutConfig
from libra.config.run import RunConfig
from libra.config.training import TrainingConfig
from libra.config.weights import WeightsConfig
from libra.errors import LibraError
from libra_supervisor.instances.client import InstanceClient
from libra_supervisor.instances.vllm import InstancePlacement, ServingPaths, server_spec
from libra_supervisor.process.spec import environment_of
from tiny_vllm_model import changed_weights, make_tiny_model
from weight_dirs import describe_version

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_ID = "run-1"
TOKEN = "the-run's-token"
START_TIMEOUT_S = 240.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RunFiles:
    """A run directory with a base model and published versions."""

    def __init__(self, root: Path, *, tied: bool = False, base: Path | None = None) -> None:
        """`base` is a model that is there already."""
        self.root = root
        self.base = base or root / "base"
        self.weights = root / "weights"
        self.weights.mkdir(parents=True)
        self.token_file = root / "token"
        self.token_file.write_text(TOKEN)
        self._tied = tied
        if base is None:
            make_tiny_model(self.base, tied=tied)

    def publish(self, version: int, *, seed: int | None = None, damage=None) -> tuple[Path, str]:
        """A version with changed weights; `damage(tensors)` spoils them before they are hashed."""
        from safetensors.numpy import save_file  # noqa: PLC0415

        directory = self.weights / f"v{version:06d}"
        directory.mkdir()
        tensors = changed_weights(self.base, seed=version if seed is None else seed)
        if damage is not None:
            damage(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(self.base / "config.json", directory)
        manifest_hash = describe_version(
            directory, version, run_id=RUN_ID, tied_embeddings=self._tied
        )
        return directory, manifest_hash


class RealServer:
    """One vLLM server process, started from the spec that the supervisor would use."""

    def __init__(
        self,
        files: RunFiles,
        name: str,
        *,
        core: int,
        tp: int = 1,
        served: Path | None = None,
        extra_args: tuple[str, ...] = (),
    ):
        """Workers on cores from `core` on; it takes weights from a disk and by transfer."""
        config = RunConfig(
            model=ModelConfig(model_path=str(files.base)),
            rollout=RolloutConfig(
                max_model_len=2048,
                rollout_max_num_seqs=64,
                rollout_extra_args=["--enable-scale-out", *extra_args],
            ),
            training=TrainingConfig(train_dtype="float32"),
            weights=WeightsConfig(rollout_weight_sync_mode="nccl"),
        )
        devices = tuple(str(core + worker) for worker in range(tp))
        self._start(files, name, config, devices, served=served)

    @classmethod
    def on_cuda(cls, files: RunFiles, name: str, config: RunConfig, devices: tuple[str, ...]):
        server = cls.__new__(cls)
        server._start(files, name, config, devices, kind="cuda")
        return server

    def _start(self, files, name, config, devices, *, kind="cpu", served=None):
        placement = InstancePlacement(
            instance_id=name,
            incarnation=f"{name}-first",
            device_kind=kind,
            devices=devices,
            host="127.0.0.1",
            port=free_port(),
        )
        self.name, self.url = name, placement.base_url
        self.log_path = files.root / f"{name}.log"
        environment = dict(os.environ)  # noqa: TID251
        paths = [str(REPOSITORY), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        spec = server_spec(
            config,
            placement,
            run_id=RUN_ID,
            paths=ServingPaths(
                python=sys.executable,
                weights_directory=str(files.weights),
                token_file=str(files.token_file),
                working_directory=str(files.root),
                log_path=str(self.log_path),
            ),
            environment=environment,
            served_directory=None if served is None else str(served),
        )
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603
                spec.argv,
                env=environment_of(spec),
                cwd=spec.cwd,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def client(self, *, token: str = TOKEN) -> InstanceClient:
        return InstanceClient(self.name, self.url, token=token)

    async def until_ready(self) -> None:
        async with self.client() as client:
            with anyio.fail_after(START_TIMEOUT_S):
                while True:
                    if self.process.poll() is not None:
                        raise AssertionError(f"{self.name} ended: {self.last_lines()}")
                    with contextlib.suppress(LibraError):
                        await client.health()
                        return
                    await clock.sleep(0.5)

    def last_lines(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-30:])

    def session_pids(self) -> list[int]:
        """Every process of the server's session that still runs."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                state, session = fields[0], int(fields[3])
                if session == self.process.pid and state != "Z":
                    found.append(int(path.parent.name))
        return found

    def commands_of(self, pids: list[int]) -> list[str]:
        return [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]

    async def until_gone(self, *, grace_s: float = 5.0) -> None:
        """Helpers of Python's own end a moment after the server; nothing may end later."""
        with anyio.move_on_after(grace_s):
            while self.session_pids():
                await clock.sleep(0.1)
        assert self.commands_of(self.session_pids()) == []

    def terminate(self) -> int:
        """SIGTERM the server alone, as the supervisor does; returns its exit code."""
        self.process.terminate()
        return self.process.wait(timeout=30)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
