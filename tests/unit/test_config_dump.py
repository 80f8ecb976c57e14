import json
from math import inf
from pathlib import Path

import pytest

from config_files import config_from, load, write_run
from libra.config.load import dump_resolved, dump_yaml, load_config, load_resolved
from libra.config.run import RunConfig
from libra.errors import ConfigError

PECULIAR = (
    "max_head_offpolicyness: .inf\n"
    "total_steps: null\nepochs: 2\n"
    "run_name: 'ünï 名'\n"
    "rollout_extra_args: []\n"
    "reward_args: {none: null, many: .inf, text: '.inf', empty: [], map: {}, deep: [{a: [~]}], "
    "signed: '-.5', nel: \"a\\x85b\", "
    "number: 1e300, e: '1e-6', on: 'yes', date: 2026-01-02, line: \"a\\nb\\u2028c\", big: "
    "123456789012345678901234567890}\n".replace("on:", "'on':")
    + "global_resource_planner: {train_pipeline_bubble_ratio_threshold: .inf}\n"
    "heterogeneous_rollout: {scheduling: {load_metric: kv_tokens, "
    "kv_capacity_tokens_by_tp: {1: 120000, 4: 450000}}}\n"
    "model_path: /modèle/🤗 dir"
)


def round_trip_json(config: RunConfig, directory: Path) -> RunConfig:
    path = directory / "resolved.json"
    path.write_bytes(dump_resolved(config))
    return load_resolved(path)


def round_trip_yaml(config: RunConfig, directory: Path) -> RunConfig:
    path = directory / "config.resolved.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8")
    return load_config(path, purpose="plan").config


@pytest.mark.case("T-B06")
def test_what_is_written_out_reads_back_equal(tmp_path: Path):
    config = config_from(PECULIAR)
    assert config.control.total_steps is None
    assert config.data.reward_args["many"] == inf
    assert config.data.reward_args["text"] == ".inf"
    assert round_trip_json(config, tmp_path) == config
    assert round_trip_yaml(config, tmp_path) == config


@pytest.mark.case("T-B06")
def test_a_null_is_written_out_and_not_left_to_the_default(tmp_path: Path):
    loaded = load(write_run(tmp_path, "reward_workers: 3"), "reward_workers=null")
    assert loaded.config.data.reward_workers is None
    assert round_trip_yaml(loaded.config, tmp_path).data.reward_workers is None
    # Reading back cannot tell, as long as no option's default differs from null.
    assert "\nreward_workers: null\n" in dump_yaml(loaded.config)
    said = json.loads(dump_resolved(loaded.config))
    assert said["data"]["reward_workers"] is None
    assert said["api"]["api_port"] is None


def test_a_loaded_run_reads_back_equal_with_its_models_shape(tmp_path: Path):
    config = load(write_run(tmp_path)).config
    assert config.model_arch is not None
    assert round_trip_json(config, tmp_path) == config
    assert round_trip_yaml(config, tmp_path) == config


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"model": {}}', b"\xff", b"null"])
def test_anything_else_is_no_resolved_configuration(tmp_path: Path, data: bytes):
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(ConfigError, match="cannot use the resolved configuration"):
        load_resolved(tmp_path / "x.json")


def test_a_missing_resolved_configuration_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nothing\.json"):
        load_resolved(tmp_path / "nothing.json")
