import json
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from libra.errors import DataError
from libra.trainer.architecture import read_architecture
from libra.trainer.rope import inverse_frequencies
from tiny_models import BASE, KINDS

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}


def write_config(directory: Path, **changes) -> Path:
    directory.mkdir(exist_ok=True)
    config = BASE | KINDS["qwen2"] | changes
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    return directory


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 0.5},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"truncate": False},
        {"attention_factor": 1.3},
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"original_max_position_embeddings": 8},
    ],
)
def test_yarn_s_frequencies_and_factor_are_those_of_transformers(tmp_path, changes):
    model = write_config(
        tmp_path / "m", rope_parameters=YARN | changes, max_position_embeddings=131072
    )
    architecture = read_architecture(model)
    wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(model), "cpu")
    assert torch.allclose(inverse_frequencies(architecture), wanted, rtol=1e-6, atol=0)
    assert architecture.rope.attention_factor == pytest.approx(factor, rel=1e-12)


def test_yarn_is_read_from_the_older_form_of_the_file_too(tmp_path):
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    model = write_config(tmp_path / "old", rope_scaling=old, rope_theta=1000000.0)
    config = json.loads((model / "config.json").read_text())
    del config["rope_parameters"]
    (model / "config.json").write_text(json.dumps(config))
    new = write_config(tmp_path / "new", rope_parameters=YARN)
    assert read_architecture(model).rope == read_architecture(new).rope


def test_a_rope_type_that_is_not_known_and_one_that_lacks_a_number_are_refused(tmp_path):
    model = write_config(tmp_path / "m", rope_parameters=YARN | {"rope_type": "longrope"})
    with pytest.raises(DataError, match="longrope is not supported, only default, linear"):
        read_architecture(model)
    lacking = {name: value for name, value in YARN.items() if name != "factor"}
    with pytest.raises(DataError, match="rope type yarn needs factor"):
        read_architecture(write_config(tmp_path / "m", rope_parameters=lacking))


def test_the_hash_of_a_model_is_the_one_in_checkpoints_that_exist(tmp_path):
    hashes = {
        "qwen2": "d994ab40144fe74557b9e1239d75314e",
        "llama_tied": "072c902fa487a163eb7aadb1ed54285b",
    }
    for kind, wanted in hashes.items():
        model = write_config(tmp_path / kind, **KINDS[kind])
        assert read_architecture(model).hash == wanted
    scaled = write_config(tmp_path / "yarn", rope_parameters=YARN)
    assert read_architecture(scaled).hash not in hashes.values()
