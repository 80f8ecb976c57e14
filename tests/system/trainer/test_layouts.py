"""The same numbers under every layout, split and after a resume; torchrun ranks do the work."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiny_models import KINDS, make_tiny_model
from trainer_gang import run_ranks

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

RUNS = {
    "dp2": (2, 1, 1, ["learning", "guards", "save"]),
    "one": (1, 1, 1, ["equality", "learning", "restore"]),
    "tp2": (2, 2, 1, ["equality", "sequence_parallel", "learning", "restore"]),
    "pp2": (2, 1, 2, ["equality", "learning", "restore"]),
    "dp2 again": (2, 1, 1, ["restore"]),
}
"""Ranks, tensor-parallel and pipeline-parallel size, parts of check_layout.py."""


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What each run's parts returned; a part that is there has passed its own checks."""
    directory = tmp_path_factory.mktemp("layouts")
    models = directory / "models"
    for kind in KINDS:
        make_tiny_model(models / kind, kind)
    script = Path(__file__).parent / "make_references.py"
    subprocess.run([sys.executable, script, models, *KINDS], check=True, capture_output=True)
    found = {}
    for name, (ranks, tensor, pipeline, parts) in RUNS.items():
        output = directory / f"{name}.json"
        arguments = [tensor, pipeline, models, directory / "saved", output, *parts]
        run_ranks("check_layout.py", ranks, *arguments, log=directory / f"{name}.log")
        found[name] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize(
    ("layout", "part"),
    [("one", "equality"), ("tp2", "equality"), ("tp2", "sequence_parallel"), ("pp2", "equality")],
)
@pytest.mark.case("T-B26")
def test_megatron_computes_what_transformers_computes(results, layout, part):
    assert part in results[layout]


@pytest.fixture
def learned(results) -> dict[str, dict[str, list[dict[str, float]]]]:
    return {name: parts["learning"] for name, parts in results.items() if "learning" in parts}


def expected_of(learned, scenario):
    objective = scenario.split("/")[0]
    one = learned["one"]
    return one[scenario if "/" not in scenario else f"{objective}/whole"]


@pytest.mark.parametrize("layout", ["one", "dp2", "tp2", "pp2"])
@pytest.mark.case("T-B18")
@pytest.mark.case("T-B19")
def test_a_step_does_not_depend_on_layout_or_micro_batches(learned, layout):
    for scenario, steps in learned[layout].items():
        for got, wanted in zip(steps, expected_of(learned, scenario), strict=True):
            where = f"{layout} {scenario}"
            assert got["num_tokens"] == wanted["num_tokens"] > 0, where
            assert got["num_optimizer_steps"] == wanted["num_optimizer_steps"], where
            assert got["clip_fraction"] == pytest.approx(wanted["clip_fraction"]), where
            for name in ("loss", "entropy", "kl_mismatch", "ratio_mean"):
                assert got[name] == pytest.approx(wanted[name], rel=3e-6, abs=1e-6), (where, name)
            assert got["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5), where


def test_the_mismatch_is_of_the_policy_before_the_first_update(learned):
    # Without a recomputation it is measured in the first forward, and comes to the same.
    recomputed = learned["one"]["plain/whole"][0]["kl_mismatch"]
    first_mini_batch = learned["one"]["two_policies/whole"][0]["kl_mismatch"]
    assert recomputed > 0.1
    assert first_mini_batch == pytest.approx(recomputed, rel=0.5)
    assert first_mini_batch != recomputed


def test_only_a_step_of_several_mini_batches_needs_a_recomputation(learned):
    plain, single = (learned["one"][n][1] for n in ("plain/whole", "one_mini_batch"))
    assert plain["num_optimizer_steps"] == 2
    assert single["num_optimizer_steps"] == 1
    assert single["ratio_mean"] == 1.0
    assert single["clip_fraction"] == 0.0


@pytest.mark.case("T-B14")
@pytest.mark.case("T-B16")
def test_what_is_not_finite_or_not_there_is_skipped_by_all_ranks_alike(results):
    assert "guards" in results["dp2"]


def test_a_resumed_run_repeats_every_step_to_the_last_bit(results):
    assert results["dp2 again"]["restore"] == results["dp2"]["save"]


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
def test_a_checkpoint_is_resumed_on_another_layout(results, layout):
    wanted, got = results["dp2"]["save"], results[layout]["restore"]
    assert got.keys() == wanted.keys()
    for variant, steps in got.items():
        tolerance = 1e-2 if "bfloat16" in variant else 2e-6
        for step, expected in zip(steps, wanted[variant], strict=True):
            assert step["loss"] == pytest.approx(expected["loss"], abs=tolerance), variant
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=tolerance)
            assert step["learning_rate"] == expected["learning_rate"]
