"""Eight schedulers over one fleet, in virtual time."""

import pytest

from herd import Herd, simulate


@pytest.mark.timeout(90)
@pytest.mark.parametrize("burst", [16, 64])
def test_ranks_that_share_their_load_are_within_a_tenth_of_one_scheduler(burst):
    herd = Herd(burst=burst, duration_s=6.0)
    alone = simulate(herd, "one scheduler")
    together = simulate(herd, "shared load")
    assert together.mean <= 1.10 * alone.mean
    assert simulate(herd, "own view").mean > together.mean
