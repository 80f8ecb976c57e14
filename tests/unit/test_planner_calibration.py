from math import inf, nan

import msgspec
import pytest

from libra.errors import InvariantError
from libra.planner.calibration import (
    Calibration,
    Observation,
    decode,
    encode,
    model_key,
    observe,
)
from planner_cases import QWEN3_14B

EMPTY = Calibration(hardware="NVIDIA H200", model="Qwen2ForCausalLM")


def seen(calibration, predicted, measured, operation="grpo_update"):
    observation = Observation(operation=operation, predicted=predicted, measured=measured)
    return observe(calibration, observation)


def test_the_first_measurement_counts_in_full():
    assert seen(EMPTY, 10, 15).ratio("grpo_update") == pytest.approx(1.5)
    assert seen(EMPTY, 10, 15).ratio("rollout_decode") == 1.0


def test_corrected_predictions_that_come_true_change_nothing():
    once = seen(EMPTY, 10, 20)
    again = seen(once, 10, 20)
    assert again.ratio("grpo_update") == pytest.approx(2)
    assert again.factors["grpo_update"].last_error_fraction == 0


def test_twice_too_slow_and_twice_too_fast_cancel():
    book = seen(seen(EMPTY, 10, 20), 10, 5)
    assert book.ratio("grpo_update") == pytest.approx(1)


def test_one_wild_measurement_moves_a_known_factor_little():
    book = EMPTY
    for _ in range(20):
        book = seen(book, 10, 20)
    wild = seen(book, 10, 20_000)
    assert 2 < wild.ratio("grpo_update") < 2 * 4**0.21


def test_a_lasting_change_is_followed():
    book = EMPTY
    for _ in range(20):
        book = seen(book, 10, 10)
    for _ in range(20):
        book = seen(book, 10, 30)
    assert book.ratio("grpo_update") == pytest.approx(3, rel=0.05)


def test_the_first_measurement_counts_in_full_however_far_from_the_data_sheet_it_is():
    assert seen(EMPTY, 1, 100).ratio("grpo_update") == pytest.approx(100)


@pytest.mark.parametrize(("predicted", "measured"), [(1e-300, 1e300), (1e300, 1e-300)])
def test_a_measurement_out_of_all_proportion_leaves_a_book_that_can_be_read_back(
    predicted, measured
):
    book = seen(EMPTY, predicted, measured)
    assert decode(encode(book), hardware=book.hardware, model=book.model) == book
    assert seen(book, predicted, measured).ratio("grpo_update") == book.ratio("grpo_update")


def test_scattered_measurements_have_a_larger_variance_than_steady_ones():
    steady = scattered = EMPTY
    for measured in (9, 11) * 10:
        steady = seen(steady, 10, 10)
        scattered = seen(scattered, 10, measured)
    assert steady.factors["grpo_update"].log_variance < 1e-9
    assert scattered.factors["grpo_update"].log_variance > 1e-3


@pytest.mark.parametrize(("predicted", "measured"), [(0, 1), (1, 0), (1, nan), (inf, 1), (1, -2)])
def test_measurements_that_mean_nothing_are_refused(predicted, measured):
    with pytest.raises(InvariantError, match="positive and finite"):
        seen(EMPTY, predicted, measured)


def test_a_stored_book_comes_back_whole_for_its_own_device_and_model():
    book = seen(EMPTY, 10, 20)
    same = decode(encode(book), hardware="NVIDIA H200", model="Qwen2ForCausalLM")
    other = decode(encode(book), hardware="NVIDIA A100", model="Qwen2ForCausalLM")
    assert same == book
    assert other == Calibration(hardware="NVIDIA A100", model="Qwen2ForCausalLM")


def test_two_models_of_one_class_have_books_of_their_own():
    assert model_key(QWEN3_14B) != model_key(msgspec.structs.replace(QWEN3_14B, vocab_size=1024))
    assert model_key(QWEN3_14B).startswith("Qwen3ForCausalLM-40x5120-")
