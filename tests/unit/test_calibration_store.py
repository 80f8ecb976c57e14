import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from structlog.testing import capture_logs

from libra.config.environment import Environment
from libra.planner.calibration import Calibration, Observation
from libra_supervisor.records.calibration import CalibrationStore, known_book, store_of
from planner_cases import grp_config

EMPTY = Calibration(hardware="NVIDIA H200", model="Qwen2ForCausalLM-28x1536-0a1b2c3d")
SLOW = Observation(operation="grpo_update", predicted=1.0, measured=2.0)


def test_what_one_run_learned_the_next_one_knows(tmp_path):
    CalibrationStore(tmp_path / "new").add(EMPTY, [SLOW])
    found = CalibrationStore(tmp_path / "new").load(EMPTY)
    assert found.ratio("grpo_update") == pytest.approx(2)
    other = Calibration(hardware="NVIDIA H200", model="another")
    assert CalibrationStore(tmp_path / "new").load(other) == other


def test_runs_side_by_side_lose_none_of_each_other_s_measurements(tmp_path):
    def measure(_run):
        store = CalibrationStore(tmp_path)
        for _ in range(20):
            store.add(EMPTY, [SLOW])

    with ThreadPoolExecutor(4) as runs:
        list(runs.map(measure, range(4)))
    factors = CalibrationStore(tmp_path).load(EMPTY).factors
    assert factors["grpo_update"].num_observations == 80


def test_a_file_that_is_no_book_is_said_and_not_used(tmp_path):
    store = CalibrationStore(tmp_path)
    store.path_of(EMPTY.hardware, EMPTY.model).write_text("{")
    with capture_logs() as said:
        assert store.load(EMPTY) == EMPTY
    assert [entry["event"] for entry in said] == ["calibration_not_read"]


@pytest.mark.parametrize(
    "factor",
    [
        {"log_ratio": 900.0, "num_observations": 3},
        {"log_ratio": -1e308},
        {"log_ratio": 0.1, "num_observations": -1},
        {"log_variance": -1.0},
    ],
)
def test_a_book_of_factors_that_cannot_be_is_said_and_the_next_measurement_begins_anew(
    tmp_path, factor
):
    store = CalibrationStore(tmp_path)
    book = {"hardware": EMPTY.hardware, "model": EMPTY.model, "factors": {"weight_sync": factor}}
    store.path_of(EMPTY.hardware, EMPTY.model).write_text(json.dumps(book))
    with capture_logs() as said:
        assert store.load(EMPTY) == EMPTY
    assert [entry["event"] for entry in said] == ["calibration_not_read"]
    assert store.add(EMPTY, [SLOW]).ratio("grpo_update") == pytest.approx(2)


def test_a_device_s_name_is_never_a_path(tmp_path):
    path = CalibrationStore(tmp_path).path_of("../../etc/x y", "a/b")
    assert path.parent == tmp_path
    assert path.name == "etc_x_y--a_b.json"


@pytest.mark.parametrize(
    ("configured", "environment", "expected"),
    [
        ("/site/books", Environment(home="/home/u"), "/site/books"),
        ("", Environment(home="/home/u"), "/home/u/.local/share/libra/calibration"),
        ("", Environment(home="/home/u", data_home="/data"), "/data/libra/calibration"),
    ],
)
def test_books_lie_where_the_configuration_says_or_with_the_user(configured, environment, expected):
    config = grp_config(planner={"calibration_dir": configured})
    path = store_of(config, environment).path_of("h", "m")
    assert str(path) == f"{expected}/h--m.json"


def test_a_user_without_a_home_keeps_nothing_and_still_has_a_book():
    config = grp_config()
    assert store_of(config, Environment()) is None
    assert known_book(config, None).factors == {}
