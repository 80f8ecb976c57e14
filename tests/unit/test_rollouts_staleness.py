from math import inf

import pytest

from libra.ids import PolicyVersion
from libra.rollouts.staleness import accepted_on_resume, capacity, staleness


@pytest.mark.case("T-B47")
@pytest.mark.parametrize(
    ("vector", "expected"),
    [
        ((2, 0, 4, 0, 0, 100), 12),
        ((2, 0, 4, 0, 12, 100), 0),
        ((2, 1, 4, 12, 0, 100), 4),
        ((0, 0, 4, 4, 0, 100), 0),
        ((0, 1, 4, 4, 0, 100), 4),
        ((2, 0, 4, 0, 0, 5), 5),
        ((2, 0, 4, 0, 12, 5), 0),
        ((2, 10, 4, 40, 0, 100), 12),
        ((inf, 0, 4, 1000, 30, 100), 70),
    ],
)
def test_the_capacity_follows_the_published_vectors(vector, expected):
    bound, version, batch, accepted, running, concurrent = vector
    assert (
        capacity(
            max_head_offpolicyness=bound,
            serving_version=PolicyVersion(version),
            batch_size=batch,
            accepted=accepted,
            running=running,
            max_concurrent=concurrent,
        )
        == expected
    )


@pytest.mark.case("T-B47")
def test_a_resumed_run_counts_what_the_old_one_trained_on():
    assert accepted_on_resume(PolicyVersion(10), 4) == 40


@pytest.mark.case("T-B59")
def test_the_batch_of_the_next_step_is_fresh_when_it_comes_from_the_newest_version():
    assert staleness(consumed_at=PolicyVersion(3), oldest=PolicyVersion(3)) == 0
    assert staleness(consumed_at=PolicyVersion(3), oldest=PolicyVersion(2)) == 1
