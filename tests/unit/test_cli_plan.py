from argparse import Namespace
from pathlib import Path

from libra.config.load import load_config
from libra.planner.calibration import Observation
from libra_supervisor.cli.inspection import plan
from libra_supervisor.records.calibration import CalibrationStore, empty_book

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "qwen3_14b_48gpu.yaml"


def planned(capsys, directory):
    overrides = (f"global_resource_planner.calibration_dir={directory}",)
    assert plan(Namespace(config=CONFIG, overrides=overrides, as_json=False)) == 0
    return capsys.readouterr().out


def test_plan_uses_and_shows_what_was_measured(tmp_path, capsys):
    unknown = planned(capsys, tmp_path)
    assert "calibration: none" in unknown
    book = empty_book(load_config(CONFIG, (), {}, purpose="plan").config)
    quick = Observation(operation="grpo_update", predicted=10.0, measured=2.5)
    CalibrationStore(tmp_path).add(book, [quick])
    known = planned(capsys, tmp_path)
    assert "calibration of Qwen3ForCausalLM-40x5120-" in known
    assert "grpo_update: x0.25 from 1 measurements, last prediction off by -75%" in known
    # Training four times as quick needs fewer of the GPUs.
    assert train_gpus(known) < train_gpus(unknown)


def train_gpus(text):
    return int(text.partition("train ")[2].partition(" GPUs")[0])
