"""What a training step does with its mini-batches, on a model of eight numbers."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from libra.errors import LearningStoppedError
from libra.ids import TrajectoryId
from libra.trainer.layout import Coordinates, ParallelSizes
from libra.trainer.step import Learner
from libra.trainer.world import World
from libra.wire.rank import Sample
from table_backend import TableBackend
from trainer_ranks import no_beat, run_config, train_step

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    meeting = tmp_path_factory.mktemp("world") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    names = ("tensor", "pipeline", "context", "expert", "data")
    yield World(
        at=Coordinates(rank=0, local_rank=0, **dict.fromkeys(names, 0)),
        sizes=ParallelSizes(**dict.fromkeys(names, 1)),
        device=torch.device("cpu"),
        tensor_group=None,
        context_group=None,
        files_group=None,
    )
    dist.destroy_process_group()


def sample(token, *, advantage=1.0, logprob=-2.0, is_masked=False):
    return Sample(
        trajectory_id=TrajectoryId(f"t{token}"),
        token_ids=np.array([0, token], "<i4").tobytes(),
        loss_mask=bytes([0, int(not is_masked)]),
        rollout_logprobs=np.array([0.0, logprob], "<f4").tobytes(),
        advantage=advantage,
    )


class Learned:
    """A learner and its model; `train` takes one step of mini-batches."""

    def __init__(self, world, tmp_path, **options):
        self.backend = TableBackend()
        options = {"importance_correction": "none", "micro_batch_size": 8} | options
        config = run_config(tmp_path, **options)
        self.learner = Learner(config, world, self.backend, no_beat)

    def train(self, *mini_batches):
        step = self.learner.progress.step + 1
        return self.learner.train(train_step(step, list(mini_batches), dp_rank=0, dp_size=1))


@pytest.fixture
def learned(world, tmp_path):
    return lambda **options: Learned(world, tmp_path, **options)


GOOD, BAD = [sample(3), sample(5, advantage=-1.0)], [sample(3, advantage=math.inf)]
MASKED = [sample(3, is_masked=True)]


def test_the_learning_rate_goes_on_with_every_optimizer_step_that_is_taken(learned):
    it = learned(learning_rate=1.0, lr_warmup_steps=8)
    assert it.train(GOOD, GOOD).learning_rate == 2 / 8
    it.train(GOOD, MASKED, BAD, GOOD)
    assert it.backend.rates == [1 / 8, 2 / 8, 3 / 8, 4 / 8]
    assert it.learner.progress.num_optimizer_steps == 4


def test_a_later_mini_batch_is_anchored_at_the_policy_before_the_step(learned):
    it = learned(learning_rate=0.5)
    before = torch.log_softmax(it.backend.logits.detach().clone(), 0)
    it.train(GOOD, GOOD)
    for old in it.backend.old_logprobs:
        assert old.tolist() == pytest.approx([float(before[3]), float(before[5])])


@pytest.mark.case("T-B49")
def test_the_kl_reference_stays_where_it_is_while_the_policy_moves(learned):
    it = learned(learning_rate=0.5, kl_coefficient=0.1)
    it.backend.reference = TableBackend()
    base = torch.log_softmax(torch.linspace(-1, 1, 8), 0)[[3, 5]].tolist()
    assert it.train(GOOD).loss == pytest.approx(0.0, abs=1e-6)
    # Without a divergence the loss, on policy and with advantages of 1 and -1, were 0 again.
    assert it.train(GOOD).loss > 1e-3
    for reference in it.backend.reference_logprobs:
        assert reference.tolist() == pytest.approx(base)


def test_without_a_recomputation_the_anchor_is_the_engine(learned):
    it = learned(recompute_logprobs=False)
    metrics = it.train(GOOD)
    (old,) = it.backend.old_logprobs
    assert old.tolist() == [-2.0, -2.0]
    log_p = torch.log_softmax(torch.linspace(-1, 1, 8), 0)[[3, 5]]
    assert metrics.ratio_mean == pytest.approx(float((log_p + 2).exp().mean()), rel=1e-6)


@pytest.mark.parametrize("num_mini_batches", [1, 3])
@pytest.mark.parametrize("recompute", [True, False])
def test_the_mismatch_is_that_of_the_policy_before_any_update(learned, num_mini_batches, recompute):
    it = learned(recompute_logprobs=recompute, learning_rate=0.5)
    d = torch.log_softmax(torch.linspace(-1, 1, 8), 0)[[3, 5]] + 2
    metrics = it.train(*[GOOD] * num_mini_batches)
    assert metrics.kl_mismatch == pytest.approx(float((d.exp() - 1 - d).mean()), rel=1e-5)


def test_metrics_are_means_over_tokens_and_optimizer_steps(learned):
    it = learned(learning_rate=1e-12)
    metrics = it.train(GOOD, [sample(1, advantage=-3.0)])
    # On policy each token's loss is minus its advantage: 0 and 3, over two optimizer steps.
    assert metrics.loss == pytest.approx(1.5)
    assert (metrics.num_tokens, metrics.ratio_mean, metrics.clip_fraction) == (3, 1.0, 0.0)
    log_p = torch.log_softmax(torch.linspace(-1, 1, 8), 0)
    assert metrics.entropy == pytest.approx(float(-(log_p.exp() * log_p).sum()), rel=1e-5)
    assert metrics.grad_norm > 0


def test_a_row_of_steps_that_are_not_finite_stops_and_one_good_step_ends_the_row(learned):
    it = learned(max_skipped_steps=3)
    before = it.backend.logits.detach().clone()
    metrics = it.train(BAD, MASKED, BAD)
    assert (metrics.num_optimizer_steps, metrics.num_skipped_steps) == (0, 3)
    assert torch.equal(it.backend.logits, before)
    assert it.learner.progress.num_skipped_in_a_row == 2
    it.train(GOOD)
    assert it.learner.progress.num_skipped_in_a_row == 0
    with pytest.raises(LearningStoppedError, match="step 3: 3 optimizer steps in a row"):
        it.train(BAD, BAD, BAD)


def test_chance_is_a_function_of_the_run_s_seed_and_the_step(learned):
    it = learned(seed=7)
    it.train(GOOD)
    it.train(GOOD)
    assert it.backend.seeds == [(7, 1), (7, 2)]


@pytest.mark.parametrize(
    ("options", "num_passes"), [({}, 2), ({"batch_size": 4, "mini_batch_size": 2}, 4)]
)
def test_a_rehearsal_takes_passes_of_two_lengths_and_changes_nothing(learned, options, num_passes):
    it = learned(max_model_len=40, **options)
    before = it.backend.logits.detach().clone()
    it.learner.rehearse()
    # 40 and 32 tokens, all but the first scored, in two rows; several mini-batches have old ones.
    assert len(it.backend.old_logprobs) == num_passes
    sizes = [None if old is None else len(old) for old in it.backend.old_logprobs]
    assert sizes == ([None, None] if num_passes == 2 else [78, 78, 62, 62])
    assert float(it.backend.logits.grad.abs().max()) == 0
    assert torch.equal(it.backend.logits, before)
    assert (it.learner.progress.step, it.learner.progress.num_optimizer_steps) == (0, 0)
    assert it.train(GOOD).num_optimizer_steps == 1
