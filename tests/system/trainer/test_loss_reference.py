"""The loss of random batches, from rewards to gradients, beside numpy written from the formulas.

Nothing of the reference is taken from the product: it goes over sequences and tokens one by one, in
double precision, and knows no micro-batch, rank, packing or padding.
"""

from itertools import product

import numpy as np
import pytest
import torch

from libra.algorithms.advantage import advantages
from libra.algorithms.objective import objective
from libra.config.algorithm import AlgorithmConfig
from libra.ids import InstanceId, PolicyVersion, PromptId
from libra.rollouts.batch import BatchShape, shard
from libra.rollouts.group import AdmittedGroup, CompleteGroup, PromptRef
from libra.rollouts.trajectory import Trajectory
from libra.trainer.batch import Arrangement, decode_mini_batch, gathered, micro_batches
from libra.trainer.loss import policy_loss
from libra.wire.instance import VersionSpan

pytestmark = pytest.mark.system
HORIZON = 12
N_SAMPLES = 4


class Scene:
    """Three groups of four answers of one to nine tokens, tool text in between, one cut off."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.groups = [self._group(rng, row) for row in range(3)]
        self.trajectories = [t for g in self.groups for t in g.trajectories]
        sampled = [np.flatnonzero(t.loss_mask) for t in self.trajectories]
        self.engine = [
            np.array(t.rollout_logprobs)[at]
            for t, at in zip(self.trajectories, sampled, strict=True)
        ]
        self.old = [b + rng.normal(0, 0.5, b.shape) for b in self.engine]
        self.new = [p + rng.normal(0, 0.5, p.shape) for p in self.old]
        self.reference = [p + rng.normal(0, 1, p.shape) for p in self.old]
        self.entropies = [rng.uniform(0, 3, p.shape) for p in self.old]

    def _group(self, rng, row: int) -> CompleteGroup:
        admitted = AdmittedGroup(PromptRef(PromptId(f"row-{row}"), row, 0), 0, N_SAMPLES)
        rewards = rng.normal(0, 1, N_SAMPLES) if row else [1.0] * N_SAMPLES
        made = [self._trajectory(rng, admitted, i, float(r)) for i, r in enumerate(rewards)]
        return CompleteGroup(admitted, tuple(made))

    def _trajectory(self, rng, admitted: AdmittedGroup, index: int, reward: float) -> Trajectory:
        num_prompt, num_response = int(rng.integers(1, 5)), int(rng.integers(1, 10))
        length = num_prompt + num_response
        is_sampled = rng.random(length) < 0.7
        is_sampled[:num_prompt], is_sampled[-1] = False, True
        return Trajectory(
            trajectory_id=admitted.trajectory_id(index),
            prompt_id=admitted.prompt.prompt_id,
            group_id=admitted.group_id,
            sample_index=index,
            token_ids=tuple(rng.integers(0, 90, length).tolist()),
            loss_mask=tuple(is_sampled.astype(int).tolist()),
            rollout_logprobs=tuple(np.where(is_sampled, -rng.exponential(2, length), 0.0).tolist()),
            version_spans=(VersionSpan(PolicyVersion(0), num_prompt, length),),
            num_prompt_tokens=num_prompt,
            finish_reason="length" if index == 1 else "stop",
            reward=reward,
            instance_ids=(InstanceId("vllm-0"),),
        )


def reference_loss(scene: Scene, new, config: AlgorithmConfig) -> float:
    """The loss as vectors/grpo.md has it; `new` are the policy's logprobs of each sequence."""
    is_trained = [
        not (config.mask_truncated and t.finish_reason == "length") for t in scene.trajectories
    ]
    num_tokens = sum(len(b) for b, yes in zip(scene.engine, is_trained, strict=True) if yes)
    num_sequences = sum(is_trained)
    total = 0.0
    for index, yes in enumerate(is_trained):
        if not yes:
            continue
        per_token = sequence_losses(scene, index, new[index], config)
        count = len(per_token)
        total += {
            "token-mean": sum(per_token) / num_tokens,
            "seq-mean-token-mean": sum(per_token) / count / num_sequences,
            "seq-mean-token-sum": sum(per_token) / num_sequences,
            "seq-mean-token-sum-norm": sum(per_token) / HORIZON / num_sequences,
        }[config.loss_agg_mode]
    return total


def sequence_losses(scene: Scene, index: int, new, config: AlgorithmConfig) -> list:
    engine, old = scene.engine[index], scene.old[index]
    advantage = reference_advantage(scene, index)
    weights = reference_weights(old - engine, config)
    losses = []
    for t in range(len(new)):
        u = np.exp(new[t] - old[t])
        if config.policy_loss == "gspo":
            u = np.exp(np.mean(np.array(new) - old))
        low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
        loss = -min(u * advantage, min(max(u, low), high) * advantage)
        if config.clip_ratio_dual and advantage < 0:
            loss = min(loss, config.clip_ratio_dual * abs(advantage))
        loss *= weights[t]
        d = new[t] - scene.reference[index][t]
        kl = {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[config.kl_estimator]
        if config.kl_unbiased:
            kl *= np.exp(new[t] - old[t])
        losses.append(
            loss
            + config.kl_coefficient * kl
            - config.entropy_coefficient * scene.entropies[index][t]
        )
    return losses


def reference_advantage(scene: Scene, index: int) -> float:
    trajectory = scene.trajectories[index]
    rewards = np.array(
        [t.reward for t in scene.trajectories if t.prompt_id == trajectory.prompt_id]
    )
    return (trajectory.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)


def reference_weights(d, config: AlgorithmConfig):
    cap, product_of_all = config.importance_cap, float(np.prod(np.exp(d)))
    match config.importance_correction:
        case "none":
            return np.ones(len(d))
        case "token_tis":
            return np.minimum(np.exp(d), cap)
        case "icepop":
            rho = np.exp(d)
            return np.where((rho >= config.importance_floor) & (rho <= cap), rho, 0.0)
        case "sequence_tis":
            return np.full(len(d), min(product_of_all, cap))
        case "sequence_mask":
            return np.full(len(d), product_of_all if product_of_all <= cap else 0.0)


def reference_gradient(scene: Scene, config: AlgorithmConfig) -> list:
    """Central differences, one token at a time."""
    step, gradients = 1e-6, []
    for index, values in enumerate(scene.new):
        of_sequence = []
        for t in range(len(values)):
            shifted = [[*scene.new], [*scene.new]]
            for sign, one in zip((1, -1), shifted, strict=True):
                moved = values.copy()
                moved[t] += sign * step
                one[index] = moved
            up, down = (reference_loss(scene, one, config) for one in shifted)
            of_sequence.append((up - down) / (2 * step))
        gradients.append(of_sequence)
    return gradients


def loss_and_gradient(scene: Scene, config: AlgorithmConfig, *, dp_size, rows, layout):
    """What all ranks' micro-batches together make of the scene."""
    index_of = {t.trajectory_id: i for i, t in enumerate(scene.trajectories)}
    rewards = [t.reward for t in scene.trajectories]
    values = advantages(rewards, [t.group_id for t in scene.trajectories], config)
    shape = BatchShape(
        dp_size=dp_size, mini_batch_size=len(rewards), mask_truncated=config.mask_truncated
    )
    total, gradients = 0.0, [np.zeros(len(n)) for n in scene.new]
    made = objective(config, temperature=1.0, top_p=1.0)
    for (mini_batch,) in shard(scene.groups, values, shape):
        decoded = decode_mini_batch(
            mini_batch, aggregation=config.loss_agg_mode, horizon_tokens=HORIZON, vocab_size=90
        )
        which = [index_of[s.trajectory_id] for s in mini_batch.samples]
        counts = [len(sample.sampled) for sample in decoded]

        def of_samples(source, which=which, counts=counts):
            pairs = zip(which, counts, strict=True)
            return [torch.tensor(source[i][:n], dtype=torch.float32) for i, n in pairs]

        arrangement = Arrangement(layout, torch.device("cpu"), length_multiple=4)
        for batch in micro_batches(decoded, rows=rows, arrangement=arrangement):
            given = batch._replace(
                old_logprobs=gathered(of_samples(scene.old), batch),
                reference_logprobs=gathered(of_samples(scene.reference), batch),
            )
            new = gathered(of_samples(scene.new), batch).requires_grad_()
            loss, _ = policy_loss(
                torch.stack([new, gathered(of_samples(scene.entropies), batch)]), given, made
            )
            (gradient,) = torch.autograd.grad(loss, new)
            total += float(loss.detach())
            parts = torch.split(gradient, batch.lengths.tolist())
            for sample, part in zip(batch.samples, parts, strict=False):
                gradients[which[sample]][: len(part)] = part.numpy()
    return total, gradients


OPTIONS = [
    *({"importance_correction": c} for c in ("none", "token_tis", "icepop")),
    *({"importance_correction": c} for c in ("sequence_tis", "sequence_mask")),
    {"policy_loss": "gspo"},
    {"policy_loss": "gspo", "importance_correction": "sequence_tis", "mask_truncated": True},
    {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_dual": 1.5},
    *({"kl_coefficient": 0.3, "kl_estimator": k} for k in ("k1", "k2", "k3")),
    {"kl_coefficient": 0.3, "kl_estimator": "k3", "kl_unbiased": True, "entropy_coefficient": 0.1},
]
AGGREGATIONS = [
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
]
SPLITS = [(1, 12, "padded"), (1, 5, "packed"), (2, 1, "packed"), (3, 3, "padded")]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.case("T-B18", "T-B19", "T-B21", "T-B29")
def test_loss_and_gradients_are_those_of_the_formulas_in_every_split(options):
    for seed, aggregation, masks in product(range(2), AGGREGATIONS, (False, True)):
        config = AlgorithmConfig(
            **{"loss_agg_mode": aggregation, "mask_truncated": masks, **options}
        )
        scene = Scene(seed)
        wanted = reference_loss(scene, scene.new, config)
        wanted_gradient = np.concatenate(reference_gradient(scene, config))
        size = np.abs(wanted_gradient).max()
        for dp_size, rows, layout in SPLITS:
            loss, gradient = loss_and_gradient(
                scene, config, dp_size=dp_size, rows=rows, layout=layout
            )
            where = (seed, aggregation, masks, dp_size, rows, layout)
            assert loss == pytest.approx(wanted, rel=1e-6, abs=1e-6), where
            got = np.concatenate(gradient)
            assert np.abs(got - wanted_gradient).max() <= 1e-5 * size, where
