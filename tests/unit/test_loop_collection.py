import pytest

from libra.ids import GroupId
from libra.rollouts.buffer import MissingGroup
from libra_supervisor.loop.collection import Collection, CollectionTerms, in_words

TERMS = CollectionTerms(timeout_s=10.0, max_retries=2)


def test_each_wait_has_its_limit_and_the_last_one_says_so():
    collection = Collection(TERMS)
    assert collection.due(now=1000.0) is None
    collection.begin(now=0.0)
    assert [collection.due(now=at) for at in (9.9, 10.0, 10.1, 19.9)] == [None, "retry", None, None]
    assert [collection.due(now=at) for at in (20.0, 29.9, 30.0, 31.0)] == [
        "retry",
        None,
        "last",
        "last",
    ]
    collection.end()
    assert collection.due(now=1000.0) is None


def test_a_batch_that_came_takes_its_retries_with_it():
    collection = Collection(TERMS)
    collection.begin(now=0.0)
    collection.due(now=10.0)
    collection.end()
    collection.begin(now=12.0)
    assert collection.num_retries == 0
    assert collection.due(now=21.9) is None


def test_time_in_which_something_else_is_in_the_way_does_not_count():
    collection = Collection(TERMS)
    collection.begin(now=0.0)
    collection.excuse(now=9.0)
    assert collection.due(now=18.9) is None
    assert collection.due(now=19.0) == "retry"


def test_a_run_without_a_limit_waits_for_ever():
    collection = Collection(CollectionTerms())
    collection.begin(now=0.0)
    assert collection.due(now=1e12) is None


@pytest.mark.parametrize(
    ("count", "end"),
    [
        (1, "waiting for p0/e0/a0 (samples 1, 3, silent for 60 s)"),
        (
            2,
            "waiting for p0/e0/a0 (samples 1, 3, silent for 60 s), p1/e0/a0 (samples 0, none runs)",
        ),
        (0, "no group is in progress"),
    ],
)
def test_what_is_missing_is_named_with_its_last_sign_of_life(count, end):
    missing = [
        MissingGroup(GroupId("p0/e0/a0"), (1, 3), 40.0),
        MissingGroup(GroupId("p1/e0/a0"), (0,), None),
    ][:count]
    text = in_words(missing, num_complete=3, num_wanted=8, now=100.0)
    assert text == f"3 of 8 groups are complete; {end}"


def test_where_no_group_is_in_progress_what_keeps_them_back_is_named():
    text = in_words((), num_complete=0, num_wanted=2, now=0.0, held_by="since nothing serves")
    assert text.endswith("; no group is in progress, since nothing serves")


def test_a_long_list_is_cut_and_counted():
    missing = [MissingGroup(GroupId(f"p{k}"), (0,), None) for k in range(20)]
    text = in_words(missing, num_complete=0, num_wanted=20, now=0.0)
    assert text.endswith("p7 (samples 0, none runs) and 12 more")
