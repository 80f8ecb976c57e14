import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from libra.config.load import dump_yaml, load_config
from libra.config.reference import markdown
from libra.config.schema import json_schema
from libra.config.surface import all_options, flat_options, nested_sections
from libra.config.wording import field_docs, type_words, value_words, yaml_words

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


def test_the_page_is_what_the_structs_say():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == markdown(), "run scripts/generate_docs.py"


def test_every_option_says_what_it_means():
    for path, option in all_options().items():
        assert len(field_docs(option.owner).get(option.name, "")) > len("Meaning"), path


def test_every_option_has_a_row():
    page = markdown()
    for path in all_options():
        assert page.count(f"| `{path}` |") == 1, path


@pytest.mark.parametrize(
    ("path", "kind", "default"),
    [
        ("train_gpus", "integer from 1", "`1`"),
        ("max_head_offpolicyness", "number from 0 or `.inf`", "`1`"),
        ("total_steps", "integer from 1 or null", "`null`"),
        ("model_path", "path", "required"),
        ("workflow_args", "mapping of anything", "`{}`"),
        ("device", "`auto`, `cpu`, `cuda`", "`auto`"),
        ("heterogeneous_rollout.instances", "list of `{tp, count}`", "`[]`"),
        (
            "heterogeneous_rollout.scheduling.kv_capacity_tokens_by_tp",
            "mapping from integer from 1 to integer from 1",
            "`{}`",
        ),
        ("global_resource_planner.train_comm_compute_ratio_threshold", "number from 0 or `.inf`",
         "`.inf`"),
    ],
)  # fmt: skip
def test_types_and_defaults_are_words(path: str, kind: str, default: str):
    option = all_options()[path]
    assert type_words(option.field.type) == kind
    assert value_words(option.default) == default


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1e-6, "1e-06"),
        (float("-inf"), "-.inf"),
        ("plain text", "plain text"),
        ("7", '"7"'),
        ("", '""'),
        ("a: b", '"a: b"'),
        ([1, "x, y"], '[1, "x, y"]'),
        ({"a": None}, "{a: null}"),
        ("two\nlines", '"two\\nlines"'),
    ],
)
def test_values_are_written_as_yaml_reads_them(value: object, text: str):
    assert yaml_words(value) == text


def test_the_schema_is_strict_json_and_knows_every_key():
    schema = json.loads(json.dumps(json_schema(), allow_nan=False))
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {
        *flat_options(),
        *nested_sections(),
        "base_config",
        "hardware_config",
        "model_arch_config",
    }
    assert schema["properties"]["batch_size"]["description"].startswith("Global training batch")
    scheduling = schema["$defs"]["SchedulingConfig"]
    assert scheduling["additionalProperties"] is False
    assert scheduling["properties"]["load_metric"]["enum"] == ["kv_tokens", "requests", "tokens"]
    assert "description" in scheduling["properties"]["load_metric"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_run_is_valid_and_reads_back_equal(path: Path, tmp_path: Path):
    loaded = load_config(path, purpose="plan")
    assert not loaded.warnings
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_yaml(loaded.config), encoding="utf-8")
    assert load_config(copy, purpose="plan").config == loaded.config


@pytest.mark.parametrize("kind", ["hardware", "model_arch"])
def test_every_shipped_hardware_and_model_file_fills_its_section(kind: str, tmp_path: Path):
    directory = {"hardware": "hardware", "model_arch": "models"}[kind]
    files = sorted((ROOT / "configs" / directory).glob("*.yaml"))
    assert len(files) >= 4
    for file in files:
        run = tmp_path / f"{file.stem}.yaml"
        run.write_text(f"{kind}_config: {file}\nmodel_path: /m\ntotal_steps: 1\n")
        assert getattr(load_config(run, purpose="plan").config, kind) is not None


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.544),
        ("qwen2.5-3b", 3.086),
        ("qwen2.5-7b", 7.616),
        ("qwen2.5-32b", 32.76),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.191),
        ("qwen3-14b", 14.77),
        ("qwen3-30b-a3b", 30.53),
        ("llama-3.1-8b", 8.030),
        ("smollm2-135m", 0.1345),
    ],
)
def test_shipped_shapes_have_the_published_number_of_parameters(name, billions, tmp_path: Path):
    run = tmp_path / "run.yaml"
    run.write_text(
        f"model_arch_config: {ROOT}/configs/models/{name}.yaml\nmodel_path: /m\ntotal_steps: 1\n"
    )
    arch = load_config(run, purpose="plan").config.model_arch
    assert arch is not None
    query = arch.num_attention_heads * arch.head_dim
    kv = arch.num_key_value_heads * arch.head_dim
    attention = arch.hidden_size * 2 * (query + kv)
    attention += (query + 2 * kv) * arch.attention_bias + 2 * arch.head_dim * arch.qk_norm
    mlp = 3 * arch.hidden_size * arch.intermediate_size
    if arch.num_experts:
        mlp = arch.num_experts * (3 * arch.hidden_size * arch.moe_intermediate_size)
        mlp += arch.num_experts * arch.hidden_size
    embedding = arch.vocab_size * arch.hidden_size * (1 if arch.tied_embeddings else 2)
    layers = arch.num_layers * (attention + mlp + 2 * arch.hidden_size)
    total = embedding + layers + arch.hidden_size
    assert total / 1e9 == pytest.approx(billions, rel=1e-3)


def test_the_generator_finds_its_page_fresh():
    script = ROOT / "scripts" / "generate_docs.py"
    done = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_loading_needs_nothing_heavy():
    code = (
        "import sys, libra.config.load; "
        "print(sorted({'numpy', 'asyncio', 'anyio', 'torch', 'aiohttp'} & set(sys.modules)))"
    )
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


READ_INSIDE = {"global_resource_planner.elastic_hybrid_max_workers"}
"""Deprecated and ignored with a warning."""


@pytest.mark.case("T-B04")
def test_no_option_is_accepted_and_read_by_nothing():
    used: set[str] = set()
    for top in ("libra", "supervisor"):
        for path in (ROOT / top).rglob("*.py"):
            if (ROOT / "libra" / "config") not in path.parents:
                used.update(re.findall(r"\.([a-z_0-9]+)\b", path.read_text(encoding="utf-8")))
    silent = {path for path, option in all_options().items() if option.name not in used}
    assert silent == READ_INSIDE


def test_sizes_that_no_integer_of_bytes_holds_are_out_of_range():
    assert "to 1000" in type_words(
        all_options()["global_resource_planner.memory_budget_workspace_factor"].field.type
    )
    reserve = all_options()["heterogeneous_rollout.scheduling.kv_activation_reserve_gib"]
    assert "to 1e+06" in type_words(reserve.field.type)
