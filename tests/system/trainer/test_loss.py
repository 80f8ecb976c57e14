import math

import pytest
import torch

from libra.algorithms.objective import objective
from libra.config.algorithm import AlgorithmConfig
from libra.trainer.batch import MicroBatch
from libra.trainer.columns import Packing
from libra.trainer.loss import correction_weights, kl_estimate, mismatch_k3, policy_loss

pytestmark = pytest.mark.system


def batch(
    *, rollout, advantages, lengths=None, old=None, reference=None, weights=None
) -> MicroBatch:
    n = len(rollout)
    zeros = torch.zeros(n, dtype=torch.int64)
    return MicroBatch(
        samples=(0,),
        token_ids=zeros[None],
        packing=Packing(positions=zeros, longest=n),
        scored=zeros,
        targets=zeros,
        lengths=torch.tensor(lengths or [n]),
        num_sampled=torch.tensor(lengths or [n]),
        rollout_logprobs=torch.tensor(rollout),
        advantages=torch.tensor(advantages),
        weights=torch.ones(n) if weights is None else torch.tensor(weights),
        old_logprobs=None if old is None else torch.tensor(old),
        reference_logprobs=None if reference is None else torch.tensor(reference),
    )


def loss_and_gradient(logprobs, given: MicroBatch, **options):
    options = {"importance_correction": "none"} | options
    values = torch.tensor(logprobs, requires_grad=True)
    scores = torch.stack([values, torch.full_like(values, 0.5)])
    made = objective(AlgorithmConfig(**options), temperature=1.0, top_p=1.0)
    loss, sums = policy_loss(scores, given, made)
    (gradient,) = torch.autograd.grad(loss, values)
    return float(loss.detach()), gradient.tolist(), sums


CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "gradient"),
    [
        (0.5, 1.0, 0.0, -0.5, -0.5),
        (0.8, 1.0, 0.0, -0.8, -0.8),
        (1.0, 1.0, 0.0, -1.0, -1.0),
        (1.25, 1.0, 0.0, -1.25, -1.25),
        (1.5, 1.0, 0.0, -1.28, 0.0),
        (0.5, -1.0, 0.0, 0.8, 0.0),
        (1.0, -1.0, 0.0, 1.0, 1.0),
        (1.5, -1.0, 0.0, 1.5, 1.5),
        (4.0, -1.0, 0.0, 4.0, 4.0),
        (4.0, -1.0, 3.0, 3.0, 0.0),
    ],
)
def test_the_clipped_loss_gives_the_published_numbers(ratio, advantage, dual, loss, gradient):
    given = batch(rollout=[-2.0], old=[-2.0], advantages=[advantage])
    got = loss_and_gradient([-2.0 + math.log(ratio)], given, clip_ratio_dual=dual, **CLIP)
    assert got[0] == pytest.approx(loss, abs=1e-6)
    assert got[1] == pytest.approx([gradient], abs=1e-6)


def test_the_first_update_has_no_loss_to_speak_of_and_still_a_gradient():
    given = batch(rollout=[-1.0, -2.0], advantages=[1.0, -1.0])
    loss, gradient, sums = loss_and_gradient([-1.0, -2.0], given)
    assert loss == 0.0
    assert gradient == [-1.0, 1.0]
    assert float(sums.ratio) == 2.0


@pytest.mark.parametrize(("advantage", "loss"), [(1.0, -1.46568331), (-1.0, 1.64872127)])
def test_the_decoupled_objective_weighs_by_the_proximal_policy(advantage, loss):
    given = batch(rollout=[-1.2], old=[-1.0], advantages=[advantage])
    got, _, sums = loss_and_gradient([-0.7], given, importance_correction="token_tis")
    assert got == pytest.approx(loss, abs=1e-6)
    assert float(sums.ratio) == pytest.approx(1.34985881, abs=1e-6)


def test_plain_ppo_is_anchored_at_the_engine():
    given = batch(rollout=[-1.2], old=[-1.2], advantages=[1.0])
    assert loss_and_gradient([-0.7], given)[0] == pytest.approx(-1.2, abs=1e-6)


def test_gspo_uses_one_ratio_for_the_whole_sequence():
    differences = [0.3, -0.1, 0.4]
    given = batch(
        rollout=[0.0] * 4, old=[0.0] * 4, advantages=[1.0] * 4, lengths=[3, 0, 1],
        weights=[1 / 3] * 3 + [1.0],
    )  # fmt: skip
    loss, gradient, sums = loss_and_gradient(
        [*differences, 0.0], given, policy_loss="gspo", clip_ratio_high=0.5
    )
    assert float(sums.ratio) == pytest.approx(3 * 1.22140276 + 1, abs=1e-5)
    assert loss == pytest.approx(-1.22140276 - 1, abs=1e-6)
    assert gradient == pytest.approx([-1.22140276 / 3] * 3 + [-1.0], abs=1e-6)


def test_cispo_caps_the_ratio_and_keeps_the_gradient():
    given = batch(rollout=[-1.6], old=[-1.6], advantages=[1.0])
    loss, gradient, _ = loss_and_gradient([-0.7], given, policy_loss="cispo", **CLIP)
    assert loss == pytest.approx(0.896, abs=1e-6)
    assert gradient == pytest.approx([-1.28], abs=1e-6)


DIFFERENCES = [0.1, -0.2, 1.5]


@pytest.mark.parametrize(
    ("correction", "cap", "expected"),
    [
        ("none", 2.0, [1.0, 1.0, 1.0]),
        ("token_tis", 2.0, [1.10517092, 0.81873075, 2.0]),
        ("icepop", 2.0, [1.10517092, 0.81873075, 0.0]),
        ("icepop", 5.0, [1.10517092, 0.81873075, 4.48168907]),
        ("sequence_tis", 2.0, [2.0] * 3),
        ("sequence_tis", 5.0, [4.05519997] * 3),
        ("sequence_mask", 5.0, [4.05519997] * 3),
        ("sequence_mask", 3.0, [0.0] * 3),
    ],
)
@pytest.mark.case("T-B29")
def test_each_correction_gives_the_published_weights(correction, cap, expected):
    given = batch(rollout=[0.0] * 4, advantages=[1.0] * 4, lengths=[3, 1])
    made = objective(
        AlgorithmConfig(importance_correction=correction, importance_cap=cap),
        temperature=1.0,
        top_p=1.0,
    )
    weights = correction_weights(torch.tensor([*DIFFERENCES, 0.0]), given, made)
    assert weights.tolist() == pytest.approx([*expected, 1.0], abs=1e-6)


def test_the_mismatch_of_the_published_vector_is_measured():
    assert float(mismatch_k3(torch.tensor(DIFFERENCES)).mean()) == pytest.approx(0.66853025)


def test_one_wild_token_leaves_the_mismatch_finite():
    assert math.isfinite(float(mismatch_k3(torch.tensor([0.0, 200.0, -200.0])).sum()))


def test_k3_is_never_negative_and_keeps_its_digits_where_policies_hardly_differ():
    small = torch.logspace(-9, -2, 5001)
    differences = torch.cat([small, -small])
    for k3 in (mismatch_k3(differences), kl_estimate(differences, "k3")):
        assert float(k3.min()) >= 0.0
        assert torch.allclose(k3, differences.square() / 2, rtol=4e-3, atol=1e-9)


def test_rejected_tokens_stay_in_the_denominator():
    given = batch(rollout=[0.0, -5.0], old=[0.0, 0.0], advantages=[1.0, 1.0], weights=[0.5, 0.5])
    loss, gradient, _ = loss_and_gradient([0.0, 0.0], given, importance_correction="icepop")
    assert loss == -0.5
    assert gradient == [-0.5, 0.0]


@pytest.mark.parametrize(
    ("difference", "k1", "k2", "k3"),
    [
        (0.5, 0.5, 0.125, 0.10653066),
        (-0.5, -0.5, 0.125, 0.14872127),
        (3.0, 3.0, 4.5, 2.04978707),
        (100.0, 10.0, 10.0, 10.0),
        (-100.0, -10.0, 10.0, 10.0),
    ],
)
def test_each_kl_estimate_gives_the_published_numbers(difference, k1, k2, k3):
    for estimator, expected in (("k1", k1), ("k2", k2), ("k3", k3)):
        got = kl_estimate(torch.tensor(difference), estimator)
        assert float(got) == pytest.approx(expected, abs=1e-6)


def test_the_kl_term_and_the_entropy_bonus_enter_with_their_weights():
    given = batch(rollout=[-1.0], advantages=[0.0], reference=[-1.5])
    loss, _, _ = loss_and_gradient(
        [-1.0], given, kl_coefficient=0.1, kl_estimator="k2", entropy_coefficient=0.2
    )
    assert loss == pytest.approx(0.1 * 0.125 - 0.2 * 0.5, abs=1e-6)


def test_the_entropy_bonus_has_a_gradient():
    given = batch(rollout=[-1.0, -2.0], advantages=[0.0, 0.0], weights=[1.0, 0.25])
    entropies = torch.tensor([0.5, 0.7], requires_grad=True)
    made = objective(AlgorithmConfig(entropy_coefficient=0.2), temperature=1.0, top_p=1.0)
    loss, _ = policy_loss(torch.stack([torch.tensor([-1.0, -2.0]), entropies]), given, made)
    (gradient,) = torch.autograd.grad(loss, entropies)
    assert gradient.tolist() == pytest.approx([-0.2, -0.05])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("is_first_update", [True, False])
def test_an_unbiased_kl_term_has_the_gradient_of_the_kl(estimator, is_first_update):
    # Every token of a small vocabulary once, weighted by how often the old policy draws it: the
    # sum over tokens is the expectation, so nothing is left to chance.
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], requires_grad=True)
    policy = torch.log_softmax(logits, 0)
    reference = torch.log_softmax(torch.tensor([-0.4, 0.2, 0.9, 0.0]), 0)
    drawn_from = torch.log_softmax(torch.tensor([0.9, -0.5, 0.2, 0.3]), 0)
    if is_first_update:
        drawn_from = policy.detach()
    divergence = (policy.exp() * (policy - reference)).sum()
    (wanted,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    given = batch(
        rollout=drawn_from.tolist(),
        old=None if is_first_update else drawn_from.tolist(),
        reference=reference.tolist(),
        advantages=[0.0] * 4,
        weights=drawn_from.exp().tolist(),
    )

    def kl_term(**options):
        made = objective(
            AlgorithmConfig(
                kl_coefficient=1.0,
                kl_estimator=estimator,
                importance_correction="none",
                **options,
            ),
            temperature=1.0,
            top_p=1.0,
        )
        loss, _ = policy_loss(torch.stack([policy, torch.zeros(4)]), given, made)
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        return float(loss.detach()), gradient

    value, gradient = kl_term(kl_unbiased=True)
    assert torch.allclose(gradient, wanted, atol=1e-6)
    if estimator != "k2":
        assert value == pytest.approx(float(divergence.detach()), abs=1e-6)
    _, biased = kl_term()
    assert torch.allclose(biased, wanted, atol=1e-3) == (estimator == "k2" and is_first_update)


def test_a_kl_term_without_a_reference_is_refused():
    given = batch(rollout=[-1.0], advantages=[0.0])
    with pytest.raises(ValueError, match="reference"):
        loss_and_gradient([-1.0], given, kl_coefficient=0.1)


@pytest.mark.case("T-B14")
def test_a_micro_batch_without_a_token_has_a_loss_of_zero_that_can_be_backpropagated():
    given = batch(rollout=[], advantages=[], lengths=[0, 0])
    for name in ("ppo_clip", "gspo", "cispo"):
        loss, gradient, _ = loss_and_gradient(
            [], given, policy_loss=name, importance_correction="sequence_tis"
        )
        assert (loss, gradient) == (0.0, [])


def test_tokens_beyond_the_clip_range_are_counted():
    ratios = [0.5, 0.5, 1.0, 1.5, 1.5]
    given = batch(rollout=[0.0] * 5, old=[0.0] * 5, advantages=[1.0, -1.0, 1.0, 1.0, -1.0])
    _, _, sums = loss_and_gradient([math.log(r) for r in ratios], given)
    assert float(sums.clipped) == 2.0
    # CISPO caps the ratio from above alone.
    _, _, sums = loss_and_gradient([math.log(r) for r in ratios], given, policy_loss="cispo")
    assert float(sums.clipped) == 1.0


def test_a_wild_ratio_stays_finite():
    given = batch(rollout=[-200.0], old=[-200.0], advantages=[-1.0])
    loss, gradient, _ = loss_and_gradient([0.0], given, importance_correction="sequence_tis")
    assert math.isfinite(loss)
    assert math.isfinite(gradient[0])
