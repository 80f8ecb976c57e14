"""What may be imported where, beyond what the import contracts can say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "megatron", "vllm", "transformers")


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after `code`."""
    program = f"import sys\n{code}\nprint(*{{m.partition('.')[0] for m in sys.modules}})"
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'supervisor'}"},
    )
    return set(done.stdout.split())


def test_the_command_line_s_help_loads_next_to_nothing():
    loaded = modules_after(
        "from libra_supervisor.cli.arguments import parser\n"
        "import libra_supervisor.cli.main\n"
        "parser()"
    )
    assert not loaded & {*HEAVY, "aiohttp", "anyio", "numpy", "msgspec", "rich", "yaml"}


@pytest.mark.parametrize(
    "module",
    ["libra_supervisor.app.run", "libra_supervisor.cli.run", "libra_supervisor.cli.inspection"],
)
def test_the_control_plane_runs_on_a_machine_without_torch(module):
    assert not modules_after(f"import {module}") & set(HEAVY)


def test_a_reward_worker_starts_light():
    loaded = modules_after("import libra.rewards.worker")
    assert not loaded & {*HEAVY, "aiohttp", "numpy", "yaml"}
