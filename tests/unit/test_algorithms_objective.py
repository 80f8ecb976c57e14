import pytest

from libra.algorithms.objective import objective, token_weight
from libra.config.algorithm import AlgorithmConfig


def aggregated(aggregation, losses_of_sequence, horizon_tokens=8):
    sampled = [losses for losses in losses_of_sequence if losses]
    return sum(
        loss
        * token_weight(
            aggregation,
            num_tokens=len(losses),
            global_num_tokens=sum(map(len, sampled)),
            global_num_sequences=len(sampled),
            horizon_tokens=horizon_tokens,
        )
        for losses in losses_of_sequence
        for loss in losses
    )


@pytest.mark.parametrize(
    ("aggregation", "losses", "expected"),
    [
        ("token-mean", [[3, 3], [0, 0, 0, 0]], 1.0),
        ("seq-mean-token-mean", [[3, 3], [0, 0, 0, 0]], 1.5),
        ("token-mean", [[1, 1], [0, 0, 0, 4], []], 1.0),
        ("seq-mean-token-mean", [[1, 1], [0, 0, 0, 4], []], 1.0),
        ("seq-mean-token-sum", [[1, 1], [0, 0, 0, 4], []], 3.0),
        ("seq-mean-token-sum-norm", [[1, 1], [0, 0, 0, 4], []], 0.375),
    ],
)
def test_each_aggregation_gives_the_published_numbers(aggregation, losses, expected):
    assert aggregated(aggregation, losses) == pytest.approx(expected)


def test_a_long_answer_outweighs_a_short_one_only_under_the_token_mean():
    def weight_of_short(aggregation):
        return aggregated(aggregation, [[1.0] * 10, [0.0] * 1000])

    assert weight_of_short("token-mean") == pytest.approx(10 / 1010)
    assert weight_of_short("seq-mean-token-mean") == pytest.approx(0.5)


@pytest.mark.parametrize(
    "aggregation",
    ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"],
)
@pytest.mark.case("T-B15")
def test_a_mini_batch_without_a_sampled_token_divides_by_one(aggregation):
    weight = token_weight(
        aggregation, num_tokens=0, global_num_tokens=0, global_num_sequences=0, horizon_tokens=0
    )
    assert weight == 1.0


def test_clip_higher_and_dual_clip_become_bounds_of_the_ratio():
    made = objective(
        AlgorithmConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_dual=3.0),
        temperature=0.6,
        top_p=0.9,
    )
    assert (made.ratio_low, made.ratio_high, made.dual_clip) == (0.8, 1.28, 3.0)
    assert (made.temperature, made.top_p) == (0.6, 0.9)
    assert objective(AlgorithmConfig(), temperature=1.0, top_p=1.0).dual_clip is None
