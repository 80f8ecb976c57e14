import pytest

from libra.algorithms.overlong import overlong_penalty
from libra.algorithms.pass_rate import pass_at_k


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(12, 0), (13, -0.25), (14, -0.5), (16, -1), (17, -1), (400, -1)]
)
def test_the_overlong_penalty_falls_from_the_cache_to_the_limit_and_no_further(num_tokens, penalty):
    assert overlong_penalty(num_tokens, max_tokens=16, cache_tokens=4) == penalty


def test_without_a_cache_the_overlong_penalty_is_a_step_at_the_limit():
    assert overlong_penalty(16, max_tokens=16, cache_tokens=0) == 0.0
    assert overlong_penalty(17, max_tokens=16, cache_tokens=0) == -1.0


def test_pass_at_k_gives_the_published_numbers():
    assert pass_at_k(8, 3, 1) == pytest.approx(0.375)
    assert pass_at_k(8, 3, 4) == pytest.approx(0.92857143)
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 1, 4) == 1.0


@pytest.mark.parametrize("k", [0, 9])
def test_more_samples_than_there_are_cannot_be_drawn(k):
    with pytest.raises(ValueError, match="cannot be told"):
        pass_at_k(8, 3, k)
