"""The smallest model that can be trained: one logit per token, whatever stands before it."""

import torch

from libra.trainer.batch import Arrangement


class TableBackend:
    """Implements what `libra.trainer.step` calls of a backend, on one rank, with plain SGD."""

    reference = None
    passes_in_step = False

    def __init__(self, vocab_size: int = 8) -> None:
        self.vocab_size = vocab_size
        self.arrangement = Arrangement("padded", torch.device("cpu"))
        self.logits = torch.linspace(-1, 1, vocab_size).requires_grad_()
        self.rates = []
        """Learning rates of the optimizer steps that were taken."""

        self.seeds = []
        self.old_logprobs = []
        """Of every micro-batch that was trained on."""

        self.reference_logprobs = []

    def seed(self, seed, step):
        self.seeds.append((seed, step))

    def logprobs(self, batches, *, sampling, beat):
        with torch.no_grad():
            return [self._scores(batch, sampling)[0] for batch in batches]

    def forward_backward(self, batches, loss, *, sampling, beat):
        self.logits.grad = torch.zeros_like(self.logits)
        sums = []
        for batch in batches:
            self.old_logprobs.append(batch.old_logprobs)
            self.reference_logprobs.append(batch.reference_logprobs)
            value, of_batch = loss(self._scores(batch, sampling), batch)
            value.backward()
            sums.append(of_batch)
        return sums

    def step_if_finite(self, *, learning_rate):
        norm = float(self.logits.grad.norm())
        is_taken = bool(self.logits.grad.isfinite().all())
        if is_taken:
            self.rates.append(learning_rate)
            with torch.no_grad():
                self.logits -= learning_rate * self.logits.grad
        return norm, is_taken

    def _scores(self, batch, sampling):
        log_p = torch.log_softmax(self.logits / sampling.temperature, 0)
        entropy = -(log_p.exp() * log_p).sum()
        return torch.stack([log_p[batch.targets], entropy.expand(len(batch.targets))])
