from pathlib import Path

import pytest

from config_files import every_problem_of, load, problems_of, write_model, write_run
from libra.config.load import load_config
from libra.config.problems import ConfigProblemsError

HARDWARE = """
device_name: X
dense_bf16_flops: 1.0
memory_bandwidth_bytes_per_s: 1.0
intra_node_bandwidth_bytes_per_s: 1.0
inter_node_bandwidth_bytes_per_s: 1.0
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_nearer_file_wins_and_mappings_merge_key_by_key(tmp_path: Path):
    write(tmp_path / "far.yaml", "seed: 1\nkeep_last: 5\napi: {api_port: 80, api_host: '::1'}")
    write(tmp_path / "near.yaml", "base_config: far.yaml\nseed: 2\napi: {api_port: 81}")
    loaded = load(write_run(tmp_path, "base_config: near.yaml\nsave_interval: 3"))
    assert loaded.config.control.seed == 2
    assert loaded.config.control.keep_last == 5
    assert (loaded.config.api.api_port, loaded.config.api.api_host) == (81, "::1")
    assert loaded.origin_of("seed").endswith("near.yaml:2")
    assert loaded.origin_of("api.api_host").endswith("far.yaml:3")
    assert loaded.origin_of("save_interval").endswith("run.yaml:7")
    assert loaded.origin_of("learning_rate") == "default"


def test_a_list_of_bases_is_read_in_order_and_a_list_value_is_replaced(tmp_path: Path):
    write(tmp_path / "a.yaml", "rollout_extra_args: ['-a']\nseed: 1")
    write(tmp_path / "b.yaml", "rollout_extra_args: ['-b']")
    config = load(write_run(tmp_path, "base_config: [a.yaml, b.yaml]")).config
    assert config.rollout.rollout_extra_args == ["-b"]
    assert config.control.seed == 1


def test_an_empty_mapping_clears_what_is_below_it(tmp_path: Path):
    write(tmp_path / "far.yaml", "workflow_args: {a: 1}\nreward_args: {b: 2}")
    config = load(
        write_run(tmp_path, "base_config: far.yaml\nworkflow_args: {}\nreward_args: {c: 3}")
    ).config
    assert config.data.workflow_args == {}
    assert config.data.reward_args == {"b": 2, "c": 3}


def test_an_empty_file_over_a_base_changes_nothing(tmp_path: Path):
    run = write_run(tmp_path)
    assert load(write(tmp_path / "top.yaml", f"base_config: {run.name}\n")).config == (
        load(run).config
    )


def test_paths_are_relative_to_the_file_that_says_them(tmp_path: Path, monkeypatch):
    run = write_run(tmp_path / "configs")
    write(tmp_path / "data" / "e.jsonl", "{}")
    write(tmp_path / "deep" / "er" / "top.yaml", "base_config: ../../configs/run.yaml")
    monkeypatch.chdir(tmp_path)
    top = Path("deep/er/top.yaml")
    assert load(top).config.data.train_data == str(tmp_path / "configs" / "d.jsonl")
    assert load(top, "train_data=data/e.jsonl").config.data.train_data == str(
        tmp_path / "data" / "e.jsonl"
    )
    assert load(top).sources == ("deep/er/top.yaml", "configs/run.yaml")
    assert run.exists()


def test_dots_in_a_path_follow_the_real_directory_and_not_the_link_to_it(tmp_path: Path):
    write_run(tmp_path / "real" / "configs", train_data="../d.jsonl")
    write(tmp_path / "real" / "d.jsonl", "{}")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "configs")
    config = load(tmp_path / "link" / "run.yaml").config
    assert config.data.train_data == str(tmp_path / "real" / "d.jsonl")


def test_home_is_written_as_a_tilde(tmp_path: Path):
    run = write_run(tmp_path, model_path="~/model")
    config = load(run, environ={"HOME": str(tmp_path)}).config
    assert config.model.model_path == str(tmp_path / "model")


def test_a_cycle_is_printed(tmp_path: Path):
    for name, base in (("a", "b"), ("b", "c"), ("c", "b")):
        write(tmp_path / f"{name}.yaml", f"base_config: {base}.yaml")
    found = problems_of(tmp_path / "a.yaml")["base_config"]
    b, c = f"{tmp_path}/b.yaml", f"{tmp_path}/c.yaml"
    assert found.what == f"the files name each other in a cycle: {b} -> {c} -> {b}"
    assert str(found.place).endswith("c.yaml:1")


def test_two_files_may_share_a_base(tmp_path: Path):
    write(tmp_path / "base.yaml", "seed: 7")
    write(tmp_path / "a.yaml", "base_config: base.yaml\nkeep_last: 3")
    write(tmp_path / "b.yaml", "base_config: base.yaml\nsave_interval: 4")
    control = load(write_run(tmp_path, "base_config: [a.yaml, b.yaml]")).config.control
    assert (control.seed, control.keep_last, control.save_interval) == (7, 3, 4)


@pytest.mark.parametrize("name", ["missing.yaml", ".", "bytes.yaml"])
def test_a_file_that_cannot_be_read_is_reported_where_it_is_named(tmp_path: Path, name: str):
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    found = problems_of(write_run(tmp_path, f"base_config: {name}"))["base_config"]
    assert "cannot read" in found.what
    assert str(found.place).endswith("run.yaml:6")


def test_names_too_long_and_links_in_a_circle_are_problems(tmp_path: Path):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name in ("x" * 5000, "circle/x.yaml", "circle"):
        assert (
            "cannot read"
            in problems_of(write_run(tmp_path, f"base_config: {name}"))["base_config"].what
        )
        assert problems_of(write_run(tmp_path, model_path=name))["model_path"]


def test_a_file_of_megabytes_is_no_configuration(tmp_path: Path):
    write(tmp_path / "big.yaml", "#" * (1 << 20) + "\n")
    assert "more than 1048576 bytes" in problems_of(tmp_path / "big.yaml")[""].what


def test_a_senseless_variable_is_reported_with_everything_else(tmp_path: Path):
    found = problems_of(write_run(tmp_path, "seed: x"), environ={"RL_TRAIN_PHASE_TRACE": "?"})
    assert set(found) == {"seed", "RL_TRAIN_PHASE_TRACE"}


def test_a_missing_configuration_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigProblemsError, match="no such file") as caught:
        load_config(tmp_path / "nothing.yaml")
    assert caught.value.exit_code == 2


def test_hardware_and_model_files_fill_their_sections_and_inline_values_win(tmp_path: Path):
    write(tmp_path / "hw" / "base.yaml", "device_name: X\nmemory_bytes: 1\nnodes: 1")
    write(
        tmp_path / "hw" / "x.yaml",
        "base_config: base.yaml\nmemory_bytes: 2\ndense_bf16_flops: 1.0\n"
        "memory_bandwidth_bytes_per_s: 1.0\nintra_node_bandwidth_bytes_per_s: 1.0\n"
        "inter_node_bandwidth_bytes_per_s: 1.0",
    )
    text = "hardware_config: hw/x.yaml\nhardware: {gpus_per_node: 4}"
    loaded = load(write_run(tmp_path, text))
    hardware = loaded.config.hardware
    assert hardware is not None
    assert (hardware.device_name, hardware.memory_bytes, hardware.gpus_per_node) == ("X", 2, 4)
    assert loaded.origin_of("hardware.memory_bytes").endswith("hw/x.yaml:2")


def test_the_nearer_reference_replaces_the_farther_one(tmp_path: Path):
    write(tmp_path / "far.yaml", "hardware_config: missing.yaml")
    assert not problems_of(write_run(tmp_path, "base_config: far.yaml\nhardware_config: ''"))


def test_a_nearer_reference_wins_over_what_a_base_says_in_its_section(tmp_path: Path):
    write(tmp_path / "x.yaml", f"{HARDWARE}memory_bytes: 80")
    write(tmp_path / "y.yaml", f"{HARDWARE}memory_bytes: 96")
    inline = "hardware: {memory_bytes: 40, nodes: 6}"
    write(tmp_path / "far.yaml", f"hardware_config: x.yaml\n{inline}")
    run = write_run(tmp_path, "base_config: far.yaml")
    near = write_run(tmp_path / "near", "base_config: ../far.yaml\nhardware_config: ../y.yaml")

    def hardware(path, *overrides):
        found = load_config(path, overrides, {}, purpose="plan").config.hardware
        assert found is not None
        return found.memory_bytes, found.nodes

    assert hardware(run) == (40, 6)
    assert hardware(near) == (96, 6), "the named file says nothing about nodes"
    assert hardware(run, f"hardware_config={tmp_path}/x.yaml") == (80, 6)
    assert hardware(near, "hardware.memory_bytes=1") == (1, 6)
    cleared = load_config(near, ["hardware_config=null"], {})
    assert cleared.config.hardware is None


def test_a_mistake_in_a_referenced_file_names_that_file(tmp_path: Path):
    write(tmp_path / "x.yaml", "device_nam: X")
    found = problems_of(write_run(tmp_path, "hardware_config: x.yaml"))
    assert str(found["hardware.device_nam"].place).endswith("x.yaml:1")
    assert "hardware.device_name" in found["hardware.device_nam"].hint
    assert found["hardware.memory_bytes"].what == "is required and not set"


def test_the_models_own_shape_is_used_where_none_is_said(tmp_path: Path):
    loaded = load(write_run(tmp_path))
    arch = loaded.config.model_arch
    assert arch is not None
    assert (arch.num_layers, arch.head_dim, arch.attention_bias) == (2, 32, True)
    assert loaded.origin_of("model_arch.num_layers") == f"{tmp_path}/model/config.json"


def test_a_said_shape_that_differs_from_the_model_is_a_problem(tmp_path: Path):
    run = write_run(tmp_path)
    write(tmp_path / "arch.yaml", "architecture: Qwen2ForCausalLM\nnum_layers: 3")
    found = problems_of(run, f"model_arch_config={tmp_path}/arch.yaml")
    assert found["model_arch.hidden_size"].what == "is required and not set"
    full = (
        "architecture: Qwen2ForCausalLM\nnum_layers: 3\nhidden_size: 128\nnum_attention_heads: 4\n"
        "num_key_value_heads: 2\nhead_dim: 32\nintermediate_size: 256\nvocab_size: 512\n"
        "tied_embeddings: true\nattention_bias: true\nmax_position_embeddings: 8192"
    )
    write(tmp_path / "arch.yaml", full)
    found = problems_of(run, f"model_arch_config={tmp_path}/arch.yaml")
    assert list(found) == ["model_arch.num_layers"]
    assert "config.json says 2" in found["model_arch.num_layers"].what


def test_overrides_come_last_and_the_last_one_wins(tmp_path: Path):
    run = write_run(tmp_path, "seed: 1")
    loaded = load(
        run,
        "seed=2",
        "seed=3",
        "heterogeneous_rollout.scheduling.prefix_affinity=true",
        "heterogeneous_rollout.scheduling.load_metric=kv_tokens",
        "heterogeneous_rollout.scheduling.kv_capacity_tokens_by_tp.4=450000",
        "heterogeneous_rollout.scheduling.kv_capacity_tokens_by_tp={1: 120000}",
        "total_steps=~",
        "epochs=2",
    )
    scheduling = loaded.config.heterogeneous_rollout.scheduling
    assert loaded.config.control.seed == 3
    assert loaded.config.control.total_steps is None
    assert scheduling.prefix_affinity
    assert scheduling.kv_capacity_tokens_by_tp == {1: 120000, 4: 450000}
    assert loaded.origin_of("seed") == "-o seed=3"


@pytest.mark.parametrize("text", ["seed", "=3", "a..b=1", ".a=1", ""])
def test_an_override_without_key_or_value_is_a_problem(tmp_path: Path, text: str):
    found = problems_of(write_run(tmp_path), text)
    assert "KEY=VALUE" in next(iter(found.values())).what


def test_an_override_with_broken_yaml_names_the_override(tmp_path: Path):
    found = problems_of(write_run(tmp_path), "reward_args={a: [1}")
    assert str(found["reward_args"].place) == "-o reward_args={a: [1}"


def test_a_base_cannot_be_overridden(tmp_path: Path):
    assert problems_of(write_run(tmp_path), "base_config=x.yaml")["base_config"].hint == (
        "name that file as CONFIG"
    )


def test_the_trace_variables_stand_between_files_and_overrides(tmp_path: Path, monkeypatch):
    run = write_run(tmp_path, "phase_trace_enabled: false")
    monkeypatch.chdir(tmp_path)
    environ = {"RL_TRAIN_PHASE_TRACE": "1", "RL_TRAIN_PHASE_TRACE_DIR": "traces"}
    loaded = load(run, environ=environ)
    assert loaded.config.tracing.phase_trace_enabled
    assert loaded.config.tracing.phase_trace_dir == str(tmp_path / "traces")
    assert loaded.origin_of("phase_trace_enabled") == "environment RL_TRAIN_PHASE_TRACE"
    overridden = load(run, "phase_trace_enabled=false", environ={"RL_TRAIN_PHASE_TRACE": "1"})
    assert not overridden.config.tracing.phase_trace_enabled


def test_only_the_first_files_kind_of_document_is_wanted(tmp_path: Path):
    for text in ("[1, 2]", "just text", "7"):
        found = problems_of(write(tmp_path / "x.yaml", text))
        assert found[""].what == "the document is not a mapping of options"
    assert "is required" in problems_of(write(tmp_path / "x.yaml", ""))["model_path"].what


def test_a_model_directory_through_a_link_is_kept_as_named(tmp_path: Path):
    run = write_run(tmp_path, model_path="latest")
    write_model(tmp_path / "models" / "a")
    (tmp_path / "latest").symlink_to(tmp_path / "models" / "a")
    assert load(run).config.model.model_path == str(tmp_path / "latest")


def test_a_file_reference_may_begin_with_home(tmp_path: Path):
    write(tmp_path / "far.yaml", "seed: 5")
    run = write_run(tmp_path / "run", "base_config: ~/far.yaml")
    assert load_config(run, environ={"HOME": str(tmp_path)}).config.control.seed == 5


def test_bases_that_double_level_by_level_are_read_a_bounded_number_of_times(tmp_path: Path):
    for level in range(40):
        below = f"{level + 1}.yaml"
        write(tmp_path / f"{level}.yaml", f"base_config: [{below}, {below}]")
    write_run(tmp_path).rename(tmp_path / "40.yaml")
    found = problems_of(tmp_path / "0.yaml")
    assert "more than 100 files" in found["base_config"].what


def test_an_override_of_a_thousand_levels_is_a_problem(tmp_path: Path):
    key = ".".join(["workflow_args", *["a"] * 1000])
    assert "levels deep" in problems_of(write_run(tmp_path), f"{key}=1")[key].what


def test_an_override_that_is_no_yaml_is_one_problem(tmp_path: Path):
    assert len(every_problem_of(write_run(tmp_path), "seed=[1")) == 1


def test_what_nobody_set_is_missing_in_the_file_whatever_is_overridden(tmp_path: Path):
    path = write(tmp_path / "run.yaml", "total_steps: 1\n")
    assert str(problems_of(path, "seed=1")["model_path"].place) == f"{path}:1"


@pytest.mark.parametrize("text", ["a: [", "- 1", "base_config: nothing.yaml"])
def test_nothing_seems_to_be_missing_when_a_file_could_not_be_read(tmp_path: Path, text: str):
    assert len(every_problem_of(write(tmp_path / "run.yaml", text))) == 1


def test_a_working_directory_that_is_gone_is_a_problem(tmp_path: Path, monkeypatch):
    run = write_run(tmp_path / "run")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "working directory" in problems_of(run)[""].what


def test_a_model_path_that_is_empty_is_not_set(tmp_path: Path):
    assert problems_of(write_run(tmp_path, model_path="''"))["model_path"].what == "is not set"
