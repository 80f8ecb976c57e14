"""Configurations for tests: from YAML text, without or with the file system."""

import json
from collections.abc import Mapping
from pathlib import Path

from libra.config.document import MapNode, parse_document
from libra.config.load import LoadedConfig, load_config
from libra.config.problems import ConfigProblemsError, Place, Problem
from libra.config.rules import check_rules, check_warnings
from libra.config.run import RunConfig
from libra.config.typed import to_config

TINY_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
BASE = {
    "model_path": "/m",
    "train_data": "/d.jsonl",
    "total_steps": "5",
    "batch_size": "8",
    "n_samples": "4",
}
ARCH = (
    "model_arch: {architecture: Qwen2ForCausalLM, num_layers: 6, hidden_size: 384, "
    "num_attention_heads: 12, num_key_value_heads: 4, head_dim: 32, intermediate_size: 768, "
    "vocab_size: 512, max_position_embeddings: 8192}"
)
"""A shape written out, as YAML."""

MOE = ARCH.replace("vocab_size", "num_experts: 6, moe_intermediate_size: 96, vocab_size")


def config_from(text: str = "", **options: str) -> RunConfig:
    """Build from YAML `text` over a small valid base; values of `options` are YAML too."""
    tree, problems = parse_document(text_of(text, **options), Place("test.yaml", 1, "/work"))
    assert not problems
    assert isinstance(tree, MapNode)
    typed = to_config(tree, home=None)
    assert not typed.problems
    return typed.config


def text_of(text: str = "", **options: str) -> str:
    """Write the base, each key replaced by `options` or by a line of `text`."""
    said = {line.partition(":")[0] for line in text.splitlines()}
    lines = [f"{k}: {v}" for k, v in {**BASE, **options}.items() if k not in said]
    return "\n".join([*lines, text])


def broken_rules(text: str = "", **options: str) -> dict[str, Problem]:
    """Problems between options, by path."""
    return {problem.path: problem for problem in check_rules(config_from(text, **options))}


def only_problem(text: str = "", **options: str) -> Problem:
    """The one rule that is broken."""
    found = broken_rules(text, **options)
    assert len(found) == 1, found
    return next(iter(found.values()))


def warnings_of(text: str = "", **options: str) -> dict[str, Problem]:
    """Warnings between options, by path."""
    return {problem.path: problem for problem in check_warnings(config_from(text, **options))}


def write_model(directory: Path, **changes: object) -> Path:
    """Write what a model directory needs to be accepted; not loadable."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = {key: value for key, value in {**TINY_MODEL, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(shape))
    (directory / "model.safetensors").write_bytes(b"")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def write_run(directory: Path, text: str = "", **options: str) -> Path:
    """Write a run that is complete on disk: run.yaml, model/, d.jsonl."""
    write_model(directory / "model")
    (directory / "d.jsonl").write_text("{}\n")
    path = directory / "run.yaml"
    paths = {"model_path": "model", "train_data": "d.jsonl"}
    path.write_text(text_of(text, **{**paths, **options}), encoding="utf-8")
    return path


def problems_of(
    path: Path, *overrides: str, environ: Mapping[str, str] | None = None
) -> dict[str, Problem]:
    """Last problem of each option, by path; empty when the run loads."""
    found = every_problem_of(path, *overrides, environ=environ)
    return {problem.path: problem for problem in found}


def every_problem_of(
    path: Path, *overrides: str, environ: Mapping[str, str] | None = None
) -> tuple[Problem, ...]:
    """Everything that is wrong with a run; empty when it loads."""
    try:
        load_config(path, overrides, environ or {})
    except ConfigProblemsError as exc:
        return exc.problems
    return ()


def load(path: Path, *overrides: str, environ: Mapping[str, str] | None = None) -> LoadedConfig:
    """Load for a run."""
    return load_config(path, overrides, environ or {})
