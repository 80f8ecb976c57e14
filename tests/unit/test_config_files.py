import json
from pathlib import Path

import pytest

from config_files import config_from, problems_of, write_model, write_run
from libra.config.availability import check_availability, check_stack
from libra.config.environment import Environment, SlurmEnvironment
from libra.config.files import check_paths
from libra.config.load import Disk, load_config
from libra.config.model_files import model_arch_of
from libra.errors import DataError


def test_a_complete_run_loads(tmp_path: Path):
    assert not problems_of(write_run(tmp_path))


def test_a_missing_model_names_key_line_and_path(tmp_path: Path):
    problem = problems_of(write_run(tmp_path, model_path="nowhere"))["model_path"]
    assert str(problem).startswith(f"{tmp_path}/run.yaml:1: model_path: there is no directory ")
    assert "nothing is downloaded" in problem.hint


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "holds no config.json"),
        ("model.safetensors", "holds no *.safetensors weights"),
        ("tokenizer.json", "holds no tokenizer.json"),
    ],
)
def test_an_incomplete_model_directory_is_refused(tmp_path: Path, missing: str, said: str):
    run = write_run(tmp_path)
    (tmp_path / "model" / missing).unlink()
    assert said in problems_of(run)["model_path"].what


def test_a_model_path_that_is_a_file_is_refused(tmp_path: Path):
    assert (
        "is no directory"
        in problems_of(write_run(tmp_path, model_path="d.jsonl"))["model_path"].what
    )


def test_the_tokenizer_has_its_own_key(tmp_path: Path):
    run = write_run(tmp_path, tokenizer_path="elsewhere")
    assert list(problems_of(run)) == ["tokenizer_path"]
    write_model(tmp_path / "elsewhere")
    assert not problems_of(run)


def test_an_architecture_that_cannot_be_trained_lists_those_that_can(tmp_path: Path):
    run = write_run(tmp_path)
    write_model(tmp_path / "model", architectures=["MambaForCausalLM"])
    problem = problems_of(run)["model_path"]
    assert "MambaForCausalLM, which megatron_core cannot train" in problem.what
    assert "LlamaForCausalLM" in problem.hint
    assert not problems_of(run, "train_backend=fsdp")


def test_head_counts_of_the_model_are_used_in_tensor_parallel_rules(tmp_path: Path):
    run = write_run(tmp_path)
    write_model(tmp_path / "model", num_attention_heads=9, num_key_value_heads=3, hidden_size=576)
    found = problems_of(run, "train_gpus=2", "train_tp_size=2")
    assert found["train_tp_size"].what == "2 does not divide the attention heads, 9"


def test_data_is_there_and_of_a_known_kind(tmp_path: Path):
    assert "is not set" in problems_of(write_run(tmp_path, train_data="''"))["train_data"].what
    assert (
        "there is no" in problems_of(write_run(tmp_path, train_data="x.jsonl"))["train_data"].what
    )
    (tmp_path / "d.csv").write_text("")
    problem = problems_of(write_run(tmp_path, train_data="d.csv"))["train_data"]
    assert ".jsonl, .jsonl.gz, .parquet" in problem.what


def test_a_token_file_that_is_named_is_there(tmp_path: Path):
    config = load_config(
        write_run(tmp_path, "api: {api_port: 0, api_token_file: token}"), purpose="plan"
    ).config
    assert [problem.path for problem in check_paths(config, Disk())] == ["api.api_token_file"]
    (tmp_path / "token").write_text("secret")
    assert not check_paths(config, Disk())


def test_a_plan_needs_neither_model_nor_data_nor_what_is_not_built(tmp_path: Path):
    run = write_run(tmp_path, model_path="nowhere", train_data="nothing", train_backend="fsdp")
    assert load_config(run, purpose="plan").config.training.train_backend == "fsdp"


# Not available yet


def test_nothing_that_is_a_default_is_unavailable():
    assert not check_availability(config_from(), Environment())


def test_nodes_that_nobody_names_are_refused_for_a_run(tmp_path: Path):
    text = (
        "hardware: {device_name: x, memory_bytes: 1, dense_bf16_flops: 1, nodes: 2, "
        "memory_bandwidth_bytes_per_s: 1, intra_node_bandwidth_bytes_per_s: 1, "
        "inter_node_bandwidth_bytes_per_s: 1}"
    )
    found = problems_of(write_run(tmp_path, text))["hardware.nodes"]
    assert found.what == "describes 2 nodes, and nobody says which they are"
    slurm = SlurmEnvironment(job_id=1, num_job_nodes=2, num_step_nodes=2)
    assert not check_availability(config_from(text), Environment(slurm=slurm))
    assert not check_availability(config_from(f"nodes: [a, b]\n{text}"), Environment())


def test_replicated_key_value_heads_are_not_trained_yet(tmp_path: Path):
    found = problems_of(write_run(tmp_path), "train_gpus=4", "train_tp_size=4")
    assert "4 is not available yet: replicating 2 key-value heads" in found["train_tp_size"].what


def test_what_the_installed_packages_cannot_do_is_said_as_such():
    precise = (
        "megatron_use_precision_aware_optimizer: true\nmegatron_use_distributed_optimizer: true"
    )
    offload = "megatron_optimizer_cpu_offload: true"

    def refused(text: str, device: str, *, engine: bool = False) -> list[str]:
        found = check_stack(config_from(text, device=device), has_transformer_engine=engine)
        assert all("the installed stack cannot" in problem.what for problem in found)
        return [problem.path for problem in found]

    assert refused(offload, "cpu") == ["megatron_optimizer_cpu_offload"]
    assert refused(offload, "cuda") == []
    assert refused(precise, "cuda") == ["megatron_use_precision_aware_optimizer"]
    assert refused(precise, "cuda", engine=True) == []
    assert refused(precise, "cpu", engine=True) == ["megatron_use_precision_aware_optimizer"]
    assert refused(f"{precise}\n{offload}", "cuda") == []
    assert len(refused(f"{precise}\n{offload}", "cpu")) == 2


# config.json


def shape(**changes: object) -> str:
    said: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    } | changes
    return json.dumps({key: value for key, value in said.items() if value is not None})


def test_defaults_of_hugging_face_are_taken():
    arch = model_arch_of(shape(num_key_value_heads=None))
    assert (arch.num_key_value_heads, arch.head_dim) == (9, 64)
    assert not (arch.tied_embeddings)
    assert not (arch.attention_bias)
    assert not (arch.qk_norm)
    assert model_arch_of(shape(architectures=["Qwen3ForCausalLM"])).head_dim == 128
    assert model_arch_of(shape(architectures=["Qwen3ForCausalLM"])).qk_norm


def test_experts_are_read():
    arch = model_arch_of(shape(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96))
    assert (arch.num_experts, arch.num_experts_per_token, arch.moe_intermediate_size) == (8, 2, 96)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        (shape(architectures=[]), "architectures"),
        (shape(architectures="x"), "architectures"),
        (shape(hidden_size=None), "`hidden_size` is None"),
        (shape(num_attention_heads=0), "`num_attention_heads` is 0"),
        (shape(num_attention_heads="9"), "`num_attention_heads` is '9'"),
        (shape(num_hidden_layers=True), "`num_hidden_layers` is True"),
        (shape(num_attention_heads=1000), "makes no sense"),
    ],
)
def test_a_config_json_without_sense_names_the_key(text: str, said: str):
    with pytest.raises(DataError, match=said):
        model_arch_of(text)


def test_a_broken_config_json_is_a_problem_of_the_model_path(tmp_path: Path):
    run = write_run(tmp_path)
    (tmp_path / "model" / "config.json").write_text("{")
    assert "config.json: not JSON" in problems_of(run)["model_path"].what
