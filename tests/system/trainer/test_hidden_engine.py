"""A machine that has Transformer Engine and no GPU, or a run on CPU where both are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[3]

RANK = """
from libra.trainer import cpu_path

cpu_path.enable()
import megatron.core.optimizer
from libra.trainer.capabilities import transformer_engine_error

print(transformer_engine_error())
"""


def test_ranks_on_the_cpu_leave_transformer_engine_alone(tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it was imported')")
    path = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "supervisor")))
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", RANK], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "transformer_engine" in done.stdout
