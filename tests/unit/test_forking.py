from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from libra.config.run import RunConfig
from libra.config.run_control import RunControlConfig
from libra.errors import ConfigError, DataError
from libra.storage.checkpoints import (
    CHECKPOINT_FORMAT,
    CheckpointManifest,
    TrainerLayout,
    list_complete_checkpoints,
    read_rollout_state,
    write_checkpoint_manifest,
)
from libra.storage.digest import file_entry
from libra_supervisor.app.exporting import run_of
from libra_supervisor.app.forking import plant_checkpoint
from libra_supervisor.loop.rollout_state import RolloutState
from libra_supervisor.run_directory import RunDirectory


class FreshData:
    """Prompts of which only the cursor is asked for."""

    cursor = property(lambda self: self)

    def dump(self) -> bytes:
        return b"at the beginning"


PROMPTS = cast("Any", FreshData())


def run_config(**control: Any) -> RunConfig:
    config = msgspec.convert({"model": {"model_path": "m"}}, RunConfig)
    return msgspec.structs.replace(config, control=RunControlConfig(**control))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "old" / "checkpoints" / "step_000004"
    directory.mkdir(parents=True)
    for name, content in (("__0_0.distcp", b"shard"), ("rollout_state.msgpack", b"of the old run")):
        (directory / name).write_bytes(content)
    layout = TrainerLayout(
        world_size=1, tensor=1, pipeline=1, context=1, expert=1, has_distributed_optimizer=False
    )
    manifest = CheckpointManifest(
        format=CHECKPOINT_FORMAT,
        step=4,
        num_optimizer_steps=8,
        num_skipped_in_a_row=0,
        architecture_hash="a",
        reference_hash="of the old reference",
        layout=layout,
        files=tuple(file_entry(path) for path in sorted(directory.iterdir())),
    )
    write_checkpoint_manifest(directory, manifest)
    return directory


def new_run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "new")
    directory.create()
    return directory


def test_a_fork_has_the_checkpoint_s_state_and_data_of_its_own(tmp_path, checkpoint):
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    directory = new_run(tmp_path)
    assert plant_checkpoint(checkpoint, directory, run_config(), PROMPTS) == 4
    (planted,) = list_complete_checkpoints(directory.checkpoints, with_hashes=True)
    assert (planted.step, planted.manifest.num_optimizer_steps) == (4, 8)
    assert planted.manifest.reference_hash is None
    assert (planted.directory / "__0_0.distcp").read_bytes() == b"shard"
    state = msgspec.msgpack.decode(read_rollout_state(planted.directory), type=RolloutState)
    assert state.cursor == b"at the beginning"
    assert state.buffer.complete == ()
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_a_fork_that_would_be_over_at_once_is_refused(tmp_path, checkpoint):
    directory = new_run(tmp_path)
    with pytest.raises(ConfigError, match="total_steps 4 is reached"):
        plant_checkpoint(checkpoint, directory, run_config(total_steps=4), PROMPTS)
    assert list(directory.checkpoints.iterdir()) == []


def test_a_checkpoint_of_the_other_backend_is_not_forked(tmp_path, checkpoint):
    directory, config = new_run(tmp_path), run_config()
    training = msgspec.structs.replace(config.training, train_backend="fsdp")
    config = msgspec.structs.replace(config, training=training)
    with pytest.raises(ConfigError, match=r"fsdp cannot read .*step_000004, which megatron_core"):
        plant_checkpoint(checkpoint, directory, config, PROMPTS)
    assert list(directory.checkpoints.iterdir()) == []


def test_a_damaged_checkpoint_is_not_forked(tmp_path, checkpoint):
    (checkpoint / "__0_0.distcp").write_bytes(b"SHARD")
    directory = new_run(tmp_path)
    with pytest.raises(DataError, match="__0_0"):
        plant_checkpoint(checkpoint, directory, run_config(), PROMPTS)
    assert list(directory.checkpoints.iterdir()) == []


def test_a_checkpoint_outside_of_a_run_cannot_say_of_what_model_it_is(tmp_path, checkpoint):
    with pytest.raises(ConfigError, match="in no run directory"):
        run_of(checkpoint)
    with pytest.raises(DataError, match="not complete"):
        run_of(tmp_path)
    RunDirectory(tmp_path / "old").resolved_config_json.write_bytes(b"{}")
    assert run_of(checkpoint).root == tmp_path / "old"
