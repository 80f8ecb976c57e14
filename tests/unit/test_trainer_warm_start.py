"""A rank that waits for its device."""

from pathlib import Path

import pytest

from libra.config.model import ModelConfig
from libra.config.run import RunConfig
from libra.errors import InvariantError
from libra.trainer import warm_start
from libra.trainer.warm_start import MODULES, until_device
from libra.wire.rank import RankWarm, SaveCheckpoint, Shutdown, TakeDevice

CONFIG = RunConfig(model=ModelConfig(model_path="m"))
ROOT = Path(__file__).parents[2]


class ToldLink:
    def __init__(self, command):
        self.command, self.happened = command, []

    def send(self, event):
        self.happened.append(event)

    def receive(self):
        return self.command


@pytest.fixture
def imported(monkeypatch):
    names = []
    monkeypatch.setattr(warm_start.importlib, "import_module", names.append)
    return names


@pytest.mark.parametrize(("command", "goes_on"), [(TakeDevice(), True), (Shutdown("x"), False)])
def test_it_imports_says_so_and_goes_on_or_leaves_as_it_is_told(imported, command, goes_on):
    link = ToldLink(command)
    assert until_device(CONFIG, link, rank=3) is goes_on
    assert imported == list(MODULES["megatron_core"])
    assert link.happened == [RankWarm(3)]


def test_without_its_device_it_can_do_nothing_else(imported):
    save = SaveCheckpoint(step=1, directory="/c", rollout_state=b"")
    with pytest.raises(InvariantError, match="without its device"):
        until_device(CONFIG, ToldLink(save), rank=0)


@pytest.mark.parametrize("backend", sorted(MODULES))
def test_what_is_imported_ahead_is_there(backend):
    for name in MODULES[backend]:
        assert ROOT.joinpath(*name.split(".")).with_suffix(".py").exists(), name
