import math
import random
import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.algorithms.advantage import advantages, group_advantages
from libra.config.algorithm import AlgorithmConfig
from libra.errors import InvariantError
from libra.rewards.coercion import LARGEST


def form(name, eps=1e-6):
    return AlgorithmConfig(advantage=name, advantage_eps=eps)


def as_float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


VECTORS = [
    ("grpo", 1e-6, [1, 0, 0, 1], [0.8660239, -0.8660239, -0.8660239, 0.8660239]),
    ("grpo", 1e-4, [1, 0, 0, 1], [0.86587543, -0.86587543, -0.86587543, 0.86587543]),
    ("grpo_population_std", 1e-8, [1, 0, 0, 1], [1, -1, -1, 1]),
    ("dr_grpo", 1e-6, [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
    ("rloo", 1e-6, [1, 0, 0, 1], [0.66666667, -0.66666667, -0.66666667, 0.66666667]),
    ("loo_std", 1e-6, [1, 0, 0, 1], [1.15469854, -1.15469854, -1.15469854, 1.15469854]),
    ("maxrl", 1e-6, [1, 0, 0, 1], [1, -1, -1, 1]),
    ("grpo", 1e-6, [0, 0, 0, 1], [-0.499999, -0.499999, -0.499999, 1.499997]),
    ("grpo", 1e-4, [0, 0, 0, 1], [-0.49990002] * 3 + [1.49970006]),
    ("grpo_population_std", 1e-8, [0, 0, 0, 1], [-0.57735026] * 3 + [1.73205077]),
    ("dr_grpo", 1e-6, [0, 0, 0, 1], [-0.25, -0.25, -0.25, 0.75]),
    ("rloo", 1e-6, [0, 0, 0, 1], [-0.33333333] * 3 + [1]),
    ("loo_std", 1e-6, [0, 0, 0, 1], [-0.57734927] * 3 + [1.0]),
    ("grpo", 1e-6, [0.2, 0.4, 0.9], [-0.83204799, -0.27734933, 1.10939732]),
    ("grpo", 1e-4, [0.2, 0.4, 0.9], [-0.83181959, -0.2772732, 1.10909279]),
    ("grpo_population_std", 1e-8, [0.2, 0.4, 0.9], [-1.0190493, -0.3396831, 1.35873239]),
    ("dr_grpo", 1e-6, [0.2, 0.4, 0.9], [-0.3, -0.1, 0.4]),
    ("rloo", 1e-6, [0.2, 0.4, 0.9], [-0.45, -0.15, 0.6]),
    ("loo_std", 1e-6, [0.2, 0.4, 0.9], [-1.27278861, -0.30304515, 4.24261069]),
    ("grpo", 1e-6, [1, 1, 0], [0.57734927, 0.57734927, -1.15469854]),
    ("grpo", 1e-4, [1, 1, 0], [0.57725029, 0.57725029, -1.15450057]),
    ("grpo_population_std", 1e-8, [1, 1, 0], [0.70710677, 0.70710677, -1.41421353]),
    ("dr_grpo", 1e-6, [1, 1, 0], [1 / 3, 1 / 3, -2 / 3]),
    ("rloo", 1e-6, [1, 1, 0], [0.5, 0.5, -1]),
    ("loo_std", 1e-6, [1, 1, 0], [0.70710578, 0.70710578, -1]),
    ("grpo", 1e-6, [1, 1, 1, 0, 0, 0, 0, 0], [1.2076124] * 3 + [-0.7245674] * 5),
    ("dr_grpo", 1e-6, [1, 1, 1, 0, 0, 0, 0, 0], [0.625] * 3 + [-0.375] * 5),
    ("rloo", 1e-6, [1, 1, 1, 0, 0, 0, 0, 0], [0.71428571] * 3 + [-0.42857143] * 5),
]


@pytest.mark.parametrize(("name", "eps", "rewards", "expected"), VECTORS)
def test_each_form_gives_the_published_numbers(name, eps, rewards, expected):
    got = group_advantages(rewards, form(name, eps))
    assert got == pytest.approx(expected, abs=6e-8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("grpo", 0.5 / (0.5**0.5 + 0.5)), ("grpo_population_std", 0.5), ("loo_std", 1.0)],
)
def test_eps_is_added_to_the_standard_deviation(name, expected):
    assert group_advantages([0.0, 1.0], form(name, 0.5))[1] == pytest.approx(expected)


FORMS = ["grpo", "grpo_population_std", "dr_grpo", "rloo", "loo_std", "maxrl"]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.35, 0.7, 1e6, -3.3])
@pytest.mark.case("T-B12")
def test_equal_rewards_give_exactly_nothing(name, value):
    for rewards in ([value] * 8, [as_float32(value)] * 8):
        assert group_advantages(rewards, form(name)) == [0.0] * 8


@pytest.mark.parametrize("value", [0.35, 0.7])
@pytest.mark.case("T-B12")
def test_the_residue_of_equal_others_is_not_taken_for_a_spread(value):
    single = group_advantages([as_float32(value)] * 7 + [0.0], form("loo_std"))[-1]
    assert single == pytest.approx(-value, rel=1e-6)


@pytest.mark.case("T-B11")
def test_leave_one_out_with_equal_others_is_not_divided_by_their_zero_std():
    single, *others = group_advantages([1, 0, 0, 0], form("loo_std"))
    assert single == 1.0
    assert others == pytest.approx([-0.57734927] * 3, abs=1e-8)
    assert group_advantages([1, 0, 0, 0], form("grpo"))[0] == pytest.approx(1.499997, abs=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_the_largest_rewards_have_advantages_in_single_precision(name):
    for rewards in ([LARGEST, -LARGEST, 0.0], [LARGEST, LARGEST * 0.9, 0.0]):
        got = group_advantages(rewards, form(name))
        assert all(math.isfinite(as_float32(advantage)) for advantage in got)


@pytest.mark.parametrize("name", FORMS)
def test_a_group_of_one_has_no_advantage(name):
    assert group_advantages([3.0], form(name)) == [0.0]


def test_maxrl_does_not_turn_the_sign_when_rewards_are_negative():
    low, high = group_advantages([-1.0, 0.0], form("maxrl"))
    assert low < 0 < high


@pytest.mark.case("T-B21")
def test_groups_are_told_apart_by_id_in_any_order_and_size():
    samples = [("a", r) for r in (0, 0, 1, 1)] + [("b", r) for r in (10, 10, 11, 11)]
    samples += [("c", r) for r in (1, 1, 0)]
    expected = {("a", 0): -0.8660239, ("a", 1): 0.8660239, ("b", 10): -0.8660239}
    expected |= {("b", 11): 0.8660239, ("c", 1): 0.57734927, ("c", 0): -1.15469854}
    for seed in range(5):
        random.Random(seed).shuffle(samples)
        got = advantages([r for _, r in samples], [g for g, _ in samples], form("grpo"))
        assert got == pytest.approx([expected[sample] for sample in samples], abs=6e-8)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
@pytest.mark.case("T-B13")
def test_a_reward_that_is_not_finite_never_becomes_an_advantage(reward):
    with pytest.raises(InvariantError, match="reached the advantages"):
        advantages([0.0, reward, 1.0], ["g", "g", "g"], form("grpo"))


@given(
    rewards=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16),
    name=st.sampled_from(["grpo", "grpo_population_std", "dr_grpo", "rloo"]),
    shift=st.floats(-10, 10),
)
def test_centred_forms_sum_to_zero_and_keep_the_order_of_rewards(rewards, name, shift):
    got = group_advantages([reward + shift for reward in rewards], form(name))
    scale = max(1.0, *(abs(a) for a in got))
    assert all(math.isfinite(a) for a in got)
    assert abs(math.fsum(got)) <= 1e-6 * scale * len(got)
    ordered = [a for _, a in sorted(zip(rewards, got, strict=True))]
    assert all(a <= b + 1e-9 * scale for a, b in pairwise(ordered))
