"""A save that is cut off anywhere leaves the checkpoint before it, or itself, and no other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from libra.storage.checkpoints import read_checkpoint_manifest, verify_checkpoint
from libra.wire.rank import (
    CheckpointSaved,
    MiniBatch,
    ModelReady,
    RankFailed,
    SaveBegun,
    SaveCheckpoint,
    StepTrained,
    TrainStep,
)
from tiny_models import make_tiny_model
from trainer_gang import REPOSITORY, SCRIPTS, FakeSupervisor, Program, trainer_environment
from trainer_ranks import make_samples, run_config

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


def test_an_attempt_that_was_taken_for_gone_publishes_nothing_over_a_later_one(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", "qwen2")
    command = [sys.executable, SCRIPTS / "check_stale.py", model, tmp_path / "checkpoints"]
    done = subprocess.run(
        command, env=trainer_environment(), cwd=REPOSITORY, capture_output=True, check=False
    )
    output = done.stdout.decode()
    assert done.returncode == 0, output + done.stderr.decode()[-4000:]
    old, new, again, steps, state, names = output.splitlines()[-6:]
    assert old.startswith("checkpoint of step 0: ")
    assert (new, steps, state) == ("written", "[0]", "new")
    assert "a later attempt (trainer-2) writes here now, not this one (trainer-1)" in again
    assert names == "['.writer', 'step_000000']"


def test_a_checkpoint_that_falls_due_while_a_snapshot_is_written_holds_no_rank(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", "qwen2")
    gate, slow = tmp_path / "gate", tmp_path / "snapshots"
    program = Program(
        arguments=(str(SCRIPTS / "slow_disk.py"),),
        environment={"SLOW_BELOW": str(slow), "SLOW_GATE": str(gate)},
    )
    with FakeSupervisor(run_config(model), tmp_path / "gang", 2, program=program) as gang:
        gang.accept_all()
        for link in gang.links.values():
            link.expect(ModelReady)
        train(gang, 1)
        save(gang, slow / "step_000001", step=1)
        train(gang, 2)
        save(gang, tmp_path / "checkpoints" / "step_000002", step=2)
        train(gang, 3)
        # All this the disk has had nothing of; and then in order.
        assert not (tmp_path / "checkpoints" / "step_000002").exists()
        gate.touch()
        saved = [gang.links[0].expect(CheckpointSaved) for _ in range(2)]
    assert [it.step for it in saved] == [1, 2]
    for it in saved:
        manifest = read_checkpoint_manifest(Path(it.directory))
        verify_checkpoint(Path(it.directory), manifest)
        assert manifest.step == it.step


def test_a_snapshot_that_finds_no_room_ends_no_rank_and_a_checkpoint_does(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", "qwen2")
    program = Program(
        arguments=(str(SCRIPTS / "full_disk.py"),), environment={"FULL_AT": str(200 << 10)}
    )
    (tmp_path / "file").touch()
    written, unmade = tmp_path / "hybrid" / "step_000001", tmp_path / "file" / "step_000001"
    with FakeSupervisor(run_config(model), tmp_path / "gang", 2, program=program) as gang:
        gang.accept_all()
        for link in gang.links.values():
            link.expect(ModelReady)
        train(gang, 1)
        for directory, why in ((written, "File too large"), (unmade, "Not a directory")):
            save(gang, directory, step=1, is_snapshot=True)
            news = gang.links[0].expect(CheckpointSaved)
            assert (news.step, news.directory) == (1, str(directory))
            assert "checkpoint of step 1" in news.error
            assert why in news.error
        assert list(written.parent.iterdir()) == []
        train(gang, 2)
        save(gang, tmp_path / "checkpoints" / "step_000002", step=2)
        failed = gang.links[0].expect(RankFailed)
    assert failed.exit_code == 5
    assert "checkpoint of step 2" in failed.message


def train(gang: FakeSupervisor, step: int) -> None:
    samples = make_samples(step, 4, 250)
    for rank, link in gang.links.items():
        own = samples[rank::2]
        batch = MiniBatch(
            samples=tuple(own),
            global_num_tokens=sum(sum(it.loss_mask) for it in samples),
            global_num_sequences=len(samples),
        )
        link.send(TrainStep(step, (batch,)))
    for link in gang.links.values():
        assert link.expect(StepTrained).step == step


def save(gang: FakeSupervisor, directory: Path, *, step: int, is_snapshot: bool = False) -> None:
    """Returns when the ranks are free again."""
    gang.send(SaveCheckpoint(step, str(directory), b"", is_snapshot=is_snapshot))
    for link in gang.links.values():
        assert link.expect(SaveBegun).step == step
