"""Which ranks claim the checkpoints of a run, and what a claim that came late still prevents."""

from types import SimpleNamespace

import pytest

from libra.config.model import ModelConfig
from libra.config.run import RunConfig
from libra.storage import writer_claim
from libra.storage.atomic import partial_sibling
from libra.storage.checkpoints import CHECKPOINT_FORMAT, CheckpointManifest, TrainerLayout
from libra.storage.writer_claim import CLAIM_NAME, claim
from libra.trainer import rank as rank_module
from libra.trainer.checkpoint import StagedCheckpoint
from libra.wire.rank import SaveCheckpoint

MANIFEST = CheckpointManifest(
    format=CHECKPOINT_FORMAT,
    step=2,
    num_optimizer_steps=2,
    num_skipped_in_a_row=0,
    architecture_hash="a",
    reference_hash=None,
    layout=TrainerLayout(
        world_size=1, tensor=1, pipeline=1, context=1, expert=1, has_distributed_optimizer=False
    ),
    files=(),
)
CONFIG = RunConfig(model=ModelConfig(model_path="m"))


@pytest.mark.parametrize(
    ("rank", "is_replica", "claims"), [(0, False, True), (1, False, False), (0, True, False)]
)
def test_the_first_rank_of_the_core_alone_claims(tmp_path, monkeypatch, rank, is_replica, claims):
    at = SimpleNamespace(rank=rank, local_rank=0)
    identity = SimpleNamespace(at=at, sizes=None, writer="trainer-7")
    for name in ("choose_device", "join_world", "assemble"):
        monkeypatch.setattr(rank_module, name, lambda *_args, **_named: None)
    pulse = SimpleNamespace(beat=lambda *_: None)
    rank_module._built(CONFIG, identity, pulse, tmp_path, is_replica=is_replica)
    assert (tmp_path / CLAIM_NAME).exists() == claims


def test_who_lost_its_claim_while_it_wrote_publishes_nothing(tmp_path, monkeypatch):
    """Though the later attempt could not remove what this one had written."""
    final = tmp_path / "step_000002"
    command = SaveCheckpoint(step=2, directory=str(final), rollout_state=b"")
    claim(tmp_path, "trainer-1")
    partial = partial_sibling(final, "trainer-1")
    partial.mkdir()
    monkeypatch.setattr(writer_claim, "discard_directory", lambda _: None)
    state = SimpleNamespace(finish=lambda _: claim(tmp_path, "trainer-2"))
    staged = StagedCheckpoint(command, None, state, MANIFEST, writer="trainer-1", began_at=0.0)
    with pytest.raises(OSError, match=r"a later attempt \(trainer-2\) writes here now"):
        staged._complete(state, [([], None)])
    assert partial.exists()
    assert not final.exists()
