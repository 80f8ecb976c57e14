"""One training step: old logprobs, then an optimizer step per mini-batch."""

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite, nan

import msgspec
import torch

from libra import clock
from libra.algorithms.learning_rate import decay_steps, learning_rate
from libra.algorithms.objective import objective
from libra.config.run import RunConfig
from libra.errors import InvariantError, LearningStoppedError
from libra.trainer.backend import Scorer, TrainBackend
from libra.trainer.batch import (
    MicroBatch,
    SampleArrays,
    decode_mini_batch,
    gathered,
    micro_batches,
    scattered,
)
from libra.trainer.exchange import Alone, Exchange, Moment, Outcome, Stepped
from libra.trainer.head import Sampling
from libra.trainer.loss import LossSums, mismatch_k3, policy_loss
from libra.trainer.memory import peak_memory_bytes
from libra.trainer.rehearsal import rehearsals
from libra.trainer.world import World, max_over_world, sum_over_world
from libra.wire.rank import TrainMetrics, TrainStep


class Progress(msgspec.Struct):
    """How far training has come; part of every checkpoint."""

    step: int = 0
    num_optimizer_steps: int = 0
    """Taken since the run began: the position of the learning-rate schedule."""

    num_skipped_in_a_row: int = 0


class StepTotals(msgspec.Struct):
    """Sums over the tokens and optimizer steps of one training step, of the whole world."""

    loss: float = 0.0
    entropy: float = 0.0
    num_clipped: float = 0.0
    ratio: float = 0.0
    mismatch: float = 0.0
    num_mismatch_tokens: int = 0
    num_tokens: int = 0
    grad_norm: float = 0.0
    num_taken: int = 0
    num_skipped: int = 0
    learning_rate: float = 0.0


class Learner:
    """Turns policy v(k-1) into v(k). Every rank calls it with its own shard, in step."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        backend: TrainBackend,
        beat: Callable[[int, str], None],
        exchange: Exchange | None = None,
    ) -> None:
        """`exchange`: where hybrid replicas take part, if any can."""
        self.progress = Progress()
        self.exchange = exchange or Alone()
        self._config = config
        self._world = world
        self._backend = backend
        self._beat = beat
        self._objective = objective(
            config.algorithm, temperature=config.rollout.temperature, top_p=config.rollout.top_p
        )
        self._sampling = Sampling(self._objective.temperature, self._objective.top_p)
        self._decay_steps = decay_steps(config.training, total_steps=config.control.total_steps)

    def beat(self, phase: str) -> None:
        """Tell the supervisor that this rank is alive and what it is doing."""
        self._beat(self.progress.step, phase)

    def rehearse(self) -> None:
        """Compute gradients that nobody takes; weights and progress stay. Every rank takes part.

        A first pass compiles kernels and gets memory, which takes seconds on a GPU.
        """
        for command in rehearsals(self._config):
            shards = [self._decode(index, command) for index in range(len(command.mini_batches))]
            for batches in self._prepare(shards, StepTotals(), command):
                self._forward_backward(batches)

    def train(self, command: TrainStep) -> TrainMetrics:
        """Take the optimizer steps of one batch; the metrics are the same on every rank.

        Raises LearningStoppedError after `max_skipped_steps` optimizer steps in a row whose loss
        or gradient norm was not finite.
        """
        if command.step != self.progress.step + 1:
            raise InvariantError(
                f"asked for step {command.step} when {self.progress.step + 1} is next"
            )
        self._backend.seed(self._config.control.seed, command.step)
        self.exchange.begin(command)
        totals = StepTotals()
        shards = [self._decode(index, command) for index in range(len(command.mini_batches))]
        began_at = clock.monotonic()
        batches = self._prepare(shards, totals, command)
        recomputed_at = clock.monotonic()
        for index, split in enumerate(batches):
            if command.mini_batches[index].global_num_tokens == 0:
                totals.num_skipped += 1
                continue
            self._train_mini_batch(split, command, index, totals)
        self.progress.step = command.step
        return self._metrics(
            totals,
            recompute_s=recomputed_at - began_at,
            train_s=clock.monotonic() - recomputed_at,
        )

    def _decode(self, index: int, command: TrainStep) -> list[SampleArrays]:
        return decode_mini_batch(
            command.mini_batches[index],
            aggregation=self._config.algorithm.loss_agg_mode,
            horizon_tokens=self._config.rollout.max_new_tokens,
            vocab_size=self._backend.vocab_size,
        )

    def _prepare(
        self, shards: Sequence[list[SampleArrays]], totals: StepTotals, command: TrainStep
    ) -> list[list[MicroBatch]]:
        """Micro-batches of each mini-batch, with old and reference logprobs in them."""
        rows = self._config.training.micro_batch_size
        prepared = [self._split(shard, rows) for shard in shards]
        if not self._config.training.recompute_logprobs:
            # Two policies: the engine's own logprobs anchor the ratio.
            prepared = [
                [batch._replace(old_logprobs=batch.rollout_logprobs) for batch in batches]
                for batches in prepared
            ]
        elif len(shards) > 1:
            prepared = self._with_old_logprobs(shards, prepared, totals, command)
        # With one mini-batch the weights do not change between a recomputation and the only
        # forward of the step, so that forward's own logprobs are the proximal policy's.
        return [self._with_reference(*pair) for pair in zip(shards, prepared, strict=True)]

    def _split(self, shard: Sequence[SampleArrays], rows: int) -> list[MicroBatch]:
        batches = micro_batches(shard, rows=rows, arrangement=self._backend.arrangement)
        if self._backend.passes_in_step:
            most = int(max_over_world(self._world, [float(len(batches))])[0])
            for _ in range(most - len(batches)):
                batches += micro_batches([], rows=rows, arrangement=self._backend.arrangement)
        return batches

    def _with_old_logprobs(
        self,
        shards: Sequence[list[SampleArrays]],
        prepared: Sequence[Sequence[MicroBatch]],
        totals: StepTotals,
        command: TrainStep,
    ) -> list[list[MicroBatch]]:
        mismatch, result = 0.0, []
        for shard, batches in zip(shards, prepared, strict=True):
            of_sample = self._score(self._backend, shard, "recompute")
            if not of_sample:
                result.append(list(batches))
                continue
            with_old = [b._replace(old_logprobs=gathered(of_sample, b)) for b in batches]
            result.append(with_old)
            mismatch += sum(_mismatch_sum(batch) for batch in with_old)
        totals.mismatch = self._sum_once(mismatch)
        totals.num_mismatch_tokens = sum(
            self.exchange.num_own_tokens(index, mini_batch)
            for index, mini_batch in enumerate(command.mini_batches)
        )
        return result

    def _with_reference(
        self, shard: Sequence[SampleArrays], batches: Sequence[MicroBatch]
    ) -> list[MicroBatch]:
        if self._backend.reference is None:
            return list(batches)
        of_sample = self._score(self._backend.reference, shard, "reference")
        if not of_sample:
            return list(batches)
        return [b._replace(reference_logprobs=gathered(of_sample, b)) for b in batches]

    def _score(
        self, scorer: Scorer, shard: Sequence[SampleArrays], phase: str
    ) -> list[torch.Tensor]:
        """Logprobs [n] of each sample on the last stage; nothing on other stages."""
        batches = self._split(shard, self._config.training.recompute_micro_batch_size)
        scores = scorer.logprobs(batches, sampling=self._sampling, beat=self._beater(phase))
        return scattered(scores, batches, len(shard)) if scores else []

    def _train_mini_batch(
        self, batches: Sequence[MicroBatch], command: TrainStep, index: int, totals: StepTotals
    ) -> None:
        at = Moment(command.step, index, self.progress.num_optimizer_steps)
        self.exchange.expect(at, command.mini_batches[index])
        sums = self._forward_backward(batches)
        outcome = self.exchange.outcome()
        loss = self._add(sums, outcome, totals)
        # Without a token there is no mean, and no step.
        self._step(loss if outcome.num_tokens else nan, totals)

    def _forward_backward(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Compute gradients; returns the loss sums, zeros where they are another rank's."""
        sums = self._backend.forward_backward(
            batches,
            partial(policy_loss, objective=self._objective),
            sampling=self._sampling,
            beat=self._beater("train"),
        )
        self._beat(self.progress.step + 1, "optimizer")
        local = torch.zeros(len(LossSums._fields), dtype=torch.float64)
        if self._world.has_results:
            for one in sums:
                local += torch.stack(list(one)).to("cpu", torch.float64)
        own: list[float] = local.tolist()
        return own

    def _add(self, own: Sequence[float], outcome: Outcome, totals: StepTotals) -> float:
        """Add the sums of one mini-batch over the world and its members; returns its loss."""
        of_members = outcome.sums or [0.0] * len(own)
        both = [mine + theirs for mine, theirs in zip(own, of_members, strict=True)]
        loss, entropy, clipped, ratio, mismatch = sum_over_world(self._world, both)
        loss, num_tokens = loss * outcome.scale, outcome.num_tokens
        # The engine is compared with the policy before the step's first update, never after.
        if totals.num_mismatch_tokens == 0:
            totals.mismatch, totals.num_mismatch_tokens = mismatch, num_tokens
        totals.loss += loss
        totals.entropy += entropy
        totals.num_clipped += clipped
        totals.ratio += ratio
        totals.num_tokens += num_tokens
        return loss

    def _step(self, loss: float, totals: StepTotals) -> None:
        training, progress = self._config.training, self.progress
        rate = learning_rate(
            training, num_taken=progress.num_optimizer_steps, decay_steps=self._decay_steps
        )
        norm, is_taken = nan, False
        if isfinite(loss):
            self.exchange.keep_gradients()
            norm, is_taken = self._backend.step_if_finite(learning_rate=rate)
        self._count(norm, rate, totals, is_taken=is_taken)
        done = (progress.num_optimizer_steps, progress.num_skipped_in_a_row)
        self.exchange.publish(Stepped(norm, rate, is_taken, *done, loss))
        if progress.num_skipped_in_a_row >= training.max_skipped_steps:
            raise LearningStoppedError(
                f"step {progress.step + 1}: {progress.num_skipped_in_a_row} optimizer steps in a "
                f"row had a loss ({loss}) or gradient norm ({norm}) that is not finite; lower "
                "learning_rate or clip_grad, or look at the rewards and logprobs of this batch"
            )

    def _count(self, norm: float, rate: float, totals: StepTotals, *, is_taken: bool) -> None:
        progress = self.progress
        totals.grad_norm, totals.learning_rate = norm, rate
        if is_taken:
            totals.num_taken += 1
            progress.num_optimizer_steps += 1
            progress.num_skipped_in_a_row = 0
        else:
            totals.num_skipped += 1
            progress.num_skipped_in_a_row += 1

    def _metrics(self, totals: StepTotals, *, recompute_s: float, train_s: float) -> TrainMetrics:
        recompute_s, train_s, peak = max_over_world(
            self._world, [recompute_s, train_s, float(peak_memory_bytes(self._world.device))]
        )
        tokens = max(totals.num_tokens, 1)
        return TrainMetrics(
            loss=totals.loss / max(totals.num_taken + totals.num_skipped, 1),
            grad_norm=totals.grad_norm,
            entropy=totals.entropy / tokens,
            clip_fraction=totals.num_clipped / tokens,
            kl_mismatch=totals.mismatch / max(totals.num_mismatch_tokens, 1),
            ratio_mean=totals.ratio / tokens,
            learning_rate=totals.learning_rate,
            num_tokens=totals.num_tokens,
            num_optimizer_steps=totals.num_taken,
            num_skipped_steps=totals.num_skipped,
            recompute_s=recompute_s,
            train_s=train_s,
            peak_memory_bytes=int(peak),
        )

    def _sum_once(self, value: float) -> float:
        return sum_over_world(self._world, [value if self._world.has_results else 0.0])[0]

    def _beater(self, phase: str) -> Callable[[], None]:
        return partial(self._beat, self.progress.step + 1, phase)


def _mismatch_sum(batch: MicroBatch) -> float:
    if batch.old_logprobs is None:
        return 0.0
    return float(mismatch_k3(batch.old_logprobs - batch.rollout_logprobs).double().sum())
