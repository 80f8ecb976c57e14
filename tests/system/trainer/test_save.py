"""A save that is cut off anywhere leaves the checkpoint before it, or itself, and no other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import make_tiny_model
from trainer_gang import REPOSITORY, SCRIPTS, trainer_environment

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


@pytest.mark.case("T-B50")
def test_a_save_killed_at_any_moment_is_complete_or_invisible(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", "qwen2")
    command = [sys.executable, SCRIPTS / "check_kill.py", model, tmp_path / "checkpoints"]
    done = subprocess.run(
        command, env=trainer_environment(), cwd=REPOSITORY, capture_output=True, check=False
    )
    output = done.stdout.decode()
    assert done.returncode == 0, output + done.stderr.decode()[-4000:]
    lines = [line.split(maxsplit=2) for line in output.splitlines() if line[0].isdecimal()]
    found = [ast.literal_eval(complete) for _, _, complete in lines]
    assert all(skipped == () for complete in found for _, skipped in complete), output
    newest = [complete[0][0] for complete in found]
    assert newest == sorted(newest)
    # Every file is opened to be written and again to be made durable; then the name is given.
    assert newest.count(1) > 15
    assert newest[-1] == 2
    assert [complete[1][0] for complete in found if complete[0][0] == 2] == [1] * newest.count(2)
