"""Checkpoints that a trainer refuses before it reads a byte of their weights."""

from types import SimpleNamespace

import msgspec
import pytest

from libra.errors import DataError
from libra.storage.checkpoints import (
    CHECKPOINT_FORMAT,
    CheckpointManifest,
    TrainerLayout,
    write_checkpoint_manifest,
)
from libra.trainer.checkpoint import restore_checkpoint, restore_weights

pytestmark = pytest.mark.system

LAYOUT = TrainerLayout(
    world_size=2, tensor=1, pipeline=1, context=1, expert=1, has_distributed_optimizer=False
)
MANIFEST = CheckpointManifest(
    format=CHECKPOINT_FORMAT,
    step=4,
    num_optimizer_steps=8,
    num_skipped_in_a_row=1,
    architecture_hash="a",
    reference_hash="r",
    layout=LAYOUT,
    files=(),
)


class Backend:
    """What restoring asks a backend about, and whether it came to that."""

    def __init__(self, *, reference_hash="r"):
        self.name, self.model_hash, self.reference_hash = "megatron_core", "a", reference_hash
        self.has_distributed_optimizer = False
        self.restored = []

    def restore(self, directory):
        self.restored.append(directory)

    restore_weights = restore


def trainer_with(backend):
    sizes, at = SimpleNamespace(expert=1), SimpleNamespace(rank=0)
    return SimpleNamespace(backend=backend, world=SimpleNamespace(sizes=sizes, at=at))


def changed(**layout):
    return {"layout": msgspec.structs.replace(LAYOUT, **layout)}


@pytest.mark.case("T-B49")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"reference_hash": "other"}, "the run's KL reference has changed: model_path holds"),
        ({"architecture_hash": "other"}, "a checkpoint of another model than model_path names"),
        ({"backend": "fsdp"}, "written with train_backend fsdp; resume with the same"),
        (changed(has_distributed_optimizer=True), "megatron_use_distributed_optimizer: true"),
        (changed(expert=2), "written with train_ep_size 2"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_and_says_of_what(tmp_path, change, why):
    write_checkpoint_manifest(tmp_path, msgspec.structs.replace(MANIFEST, **change))
    backend = Backend()
    with pytest.raises(DataError, match=why):
        restore_checkpoint(trainer_with(backend), tmp_path)
    assert backend.restored == []


@pytest.mark.case("T-B49")
def test_a_run_without_a_reference_reads_any(tmp_path):
    write_checkpoint_manifest(tmp_path, MANIFEST)
    backend = Backend(reference_hash=None)
    assert restore_weights(trainer_with(backend), tmp_path) == 4
    assert backend.restored == [tmp_path]


@pytest.mark.parametrize("change", [{"architecture_hash": "other"}, {"backend": "fsdp"}])
def test_weights_alone_are_read_from_checkpoints_of_the_same_model_only(tmp_path, change):
    write_checkpoint_manifest(tmp_path, msgspec.structs.replace(MANIFEST, **change))
    with pytest.raises(DataError, match=r"another model|train_backend fsdp"):
        restore_weights(trainer_with(Backend()), tmp_path)


@pytest.mark.parametrize("restore", [restore_checkpoint, restore_weights])
def test_a_damaged_checkpoint_is_not_restored(tmp_path, restore):
    write_checkpoint_manifest(tmp_path, MANIFEST)
    (tmp_path / "stray").write_bytes(b"x")
    backend = Backend()
    with pytest.raises(DataError, match="stray is there but not in the manifest"):
        restore(trainer_with(backend), tmp_path)
    assert backend.restored == []
