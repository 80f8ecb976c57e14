"""No text, override or environment makes loading raise anything but a ConfigError."""

import contextlib
import string
from math import inf
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config_files import text_of
from libra.config.document import MapNode, parse_document
from libra.config.load import dump_resolved, dump_yaml, load_config, load_resolved
from libra.config.problems import Place
from libra.config.surface import all_options, flat_options, nested_sections
from libra.config.typed import to_config
from libra.errors import ConfigError
from libra_supervisor.validate.verb import Request, validate

KEYS = [*flat_options(), *nested_sections(), *(o.name for o in all_options().values()),
        "base_config", "hardware_config", "<<", "min_train_gpu", "1", "yes"]  # fmt: skip
ODD_TEXT = ["1e-6", "grp", "kv_tokens", ".inf", "none", "a.yaml", "run.yaml", "../", "~/x", "0"]
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([*ODD_TEXT, "\ud800"])
)
any_keys = st.sampled_from(KEYS) | st.text(max_size=5) | st.integers()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_keys, inner, max_size=4),
    max_leaves=12,
)
documents = st.dictionaries(st.sampled_from(KEYS), values, max_size=8)
PIECES = ["a: ", "- ", "\n", "  ", "&x ", "*x", "<<: ", "!!python/object:os.system ", "'", '"',
          "{", "}", "[", "]", ": ", "#", "|\n", ">\n", "? ", "---\n", "...\n", "%TAG ! x\n",
          "%YAML 1.1\n", "model_path: m\n", "train_gpus: ", "\\U00110000", "\\x", "\t", "\x00",
          "\ufeff", "~", "1e-6", "!", "!!float ", "!!int 0x", "!!null x", "0b", "=", "\u2028",
          "🤗", "9" * 400]  # fmt: skip
broken_yaml = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=25).map("".join)
quick = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
slow = settings(quick, max_examples=40)


def try_to_load(path: Path, *overrides: str) -> None:
    with contextlib.suppress(ConfigError):
        load_config(path, overrides)


@quick
@given(text=broken_yaml | st.text())
def test_no_text_raises_an_unmapped_error(text: str, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try_to_load(path)


@quick
@given(data=st.binary(max_size=200))
def test_no_bytes_raise_an_unmapped_error(data: bytes, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_bytes(data)
    try_to_load(path)


@slow
@given(document=documents)
def test_no_document_of_known_keys_raises_an_unmapped_error(document: Any, tmp_path: Path):
    path = tmp_path / "run.yaml"
    text = yaml.safe_dump(document, allow_unicode=True)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    out = validate(Request(path=path, purpose="plan"))
    assert out.exit_code in {0, 2}


@quick
@given(text=st.text() | st.tuples(st.sampled_from(KEYS), broken_yaml).map("=".join))
def test_no_override_raises_an_unmapped_error(text: str, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("model_path: /m\ntotal_steps: 1\n")
    try_to_load(path, text)


@quick
@given(
    name=st.sampled_from(["RL_TRAIN_PHASE_TRACE", "RL_TRAIN_PHASE_TRACE_DIR", "HOME",
                          "SLURM_JOB_ID", "RANK", "CUDA_VISIBLE_DEVICES"]),
    text=st.text(),
)  # fmt: skip
def test_no_environment_raises_an_unmapped_error(name: str, text: str, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("model_path: ~/m\ntotal_steps: 1\n")
    environ = {"SLURM_JOB_ID": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", name: text}
    with contextlib.suppress(ConfigError):
        load_config(path, environ=environ)


# Round trip

paths = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/."), min_size=1, max_size=8
).map(lambda name: f"/data/{name}")
argument_names = st.text(string.printable, max_size=6)
arguments = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=10)
    | st.sampled_from(["yes", "1e-6", ".inf", "null", "~", "2026-01-02", "0x1", "1:30", "=", "<<"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(string.printable, max_size=6), inner, max_size=3)
    ),
    max_leaves=10,
)
options = st.fixed_dictionaries(
    {"model_path": paths, "total_steps": st.integers(1, 2**62)},
    optional={
        "train_data": paths,
        "epochs": st.none() | st.integers(1, 9),
        "max_run_s": st.none() | st.floats(1e-300, 1e300),
        "learning_rate": st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        "max_head_offpolicyness": st.integers(0, 99).map(float) | st.just(inf),
        "reward_workers": st.none() | st.integers(1, 64),
        "rollout_enforce_eager": st.none() | st.booleans(),
        "rollout_extra_args": st.lists(st.text(string.printable, max_size=6), max_size=3),
        "reward_args": st.dictionaries(
            st.text(string.printable, max_size=6), arguments, max_size=4
        ),
        "run_name": st.text(string.ascii_letters + "éß名-", max_size=6),
        "heterogeneous_rollout": st.fixed_dictionaries(
            {
                "scheduling": st.fixed_dictionaries(
                    {
                        "load_metric": st.just("kv_tokens"),
                        # Something has to be said of TP 1, the degree of the run, or nothing.
                        "kv_capacity_tokens_by_tp": st.just({})
                        | st.dictionaries(st.integers(1, 8), st.integers(1, 2**40), max_size=3).map(
                            lambda capacities: {1: 9, **capacities}
                        ),
                    }
                )
            }
        ),
    },
)


@pytest.mark.case("T-B06")
@slow
@given(said=options)
def test_every_configuration_reads_back_equal(said: dict[str, Any], tmp_path: Path):
    text = text_of("\n".join(f"{key}: {_flow(value)}" for key, value in said.items()))
    tree, problems = parse_document(text, Place("a.yaml", 1, "/"))
    assert not problems
    assert isinstance(tree, MapNode)
    typed = to_config(tree, home=None)
    assert not typed.problems
    assert typed.config.data.reward_args == said.get("reward_args", {})
    path = tmp_path / "resolved"
    path.write_bytes(dump_resolved(typed.config))
    assert load_resolved(path) == typed.config
    path.write_text(dump_yaml(typed.config), encoding="utf-8")
    assert load_config(path, purpose="plan").config == typed.config


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("...\n").strip()
