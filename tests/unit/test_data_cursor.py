import numpy as np
import pytest

from libra.data.cursor import Cursor, permutation, visits_of_epochs
from libra.errors import DataError


def cursor(num_rows=8, *, seed=0, shuffle=True, max_visits=None, fingerprint="f"):
    return Cursor(
        np.arange(num_rows),
        fingerprint=fingerprint,
        seed=seed,
        shuffle=shuffle,
        max_visits=max_visits,
    )


def take(cursor, count):
    return [cursor.next() for _ in range(count)]


def test_the_order_of_an_epoch_is_the_same_on_every_machine():
    assert permutation(7, 2, 10).tolist() == [6, 7, 8, 4, 0, 1, 5, 3, 9, 2]


def test_every_epoch_has_every_row_once_in_another_order():
    refs = take(cursor(20), 60)
    epochs = [[r.row for r in refs[start : start + 20]] for start in (0, 20, 40)]
    assert all(sorted(rows) == list(range(20)) for rows in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [r.epoch for r in refs] == [0] * 20 + [1] * 20 + [2] * 20


def test_another_seed_gives_another_order():
    assert take(cursor(20), 20) != take(cursor(20, seed=1), 20)


def test_without_shuffling_rows_come_as_in_the_file():
    assert [r.row for r in take(cursor(3, shuffle=False), 7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_row_has_the_same_prompt_id_in_every_epoch():
    refs = take(cursor(1), 2)
    assert refs[0].prompt_id == refs[1].prompt_id
    assert refs[0] != refs[1]


@pytest.mark.case("T-B41")
@pytest.mark.parametrize(
    ("rows", "epochs", "per_step", "visits"),
    [(3, 1, 8, 8), (9, 2, 8, 24), (8, 2, 8, 16), (1, 1, 1, 1)],
)
def test_the_last_step_is_filled_from_the_next_epoch(rows, epochs, per_step, visits):
    limit = visits_of_epochs(num_prompts=rows, epochs=epochs, prompts_per_step=per_step)
    assert limit == visits
    refs = take(cursor(rows, max_visits=limit), limit + 1)
    assert refs[-1] is None
    seen = [r.row for r in refs[:-1]]
    assert min(seen.count(row) for row in range(rows)) >= epochs


@pytest.mark.case("T-B41")
def test_no_rows_at_all_is_an_error_not_a_finished_run():
    with pytest.raises(DataError, match="no usable row"):
        cursor(0)


@pytest.mark.case("T-B45")
def test_a_stop_at_any_row_and_a_resume_give_the_uninterrupted_sequence():
    whole = take(cursor(8), 40)
    for stopped_after in range(40):
        first = cursor(8)
        before = take(first, stopped_after)
        resumed = cursor(8)
        resumed.restore(first.dump())
        assert before + take(resumed, 40 - stopped_after) == whole


@pytest.mark.case("T-B45")
def test_a_resume_at_the_end_of_an_epoch_goes_on_with_the_next():
    first = cursor(8, shuffle=False)
    take(first, 8)
    resumed = cursor(8, shuffle=False)
    resumed.restore(first.dump())
    ref = resumed.next()
    assert (ref.epoch, ref.row) == (1, 0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (cursor(8, fingerprint="g"), r"the training data, or .*fingerprint f, now g"),
        (cursor(8, seed=3), "written with seed 0, not 3"),
    ],
)
def test_a_position_in_other_data_is_refused(other, message):
    with pytest.raises(DataError, match=message):
        other.restore(cursor(8).dump())


def test_a_damaged_position_is_a_data_error():
    with pytest.raises(DataError, match="cannot be read"):
        cursor().restore(b"\xc1")
