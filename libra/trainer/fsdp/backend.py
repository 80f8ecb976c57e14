"""`TrainBackend` over a transformers model under FSDP2: data parallelism only."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from libra.config.run import RunConfig
from libra.errors import ConfigError, InvariantError
from libra.storage.digest import hash_bytes, hash_of_weights
from libra.trainer.backend import Beat, HfTensor, Loss, Scorer
from libra.trainer.batch import Arrangement, MicroBatch
from libra.trainer.fsdp import checkpoint
from libra.trainer.fsdp.model import (
    ScoringModel,
    checkpoint_layers,
    load_language_model,
    shard,
)
from libra.trainer.fsdp.optimizer import build_optimizer, step_if_finite
from libra.trainer.fsdp.weights import export_plan, local, whole_tensors
from libra.trainer.head import Head, Sampling, score_request
from libra.trainer.host_memory import ALIGNMENT, HostMemory
from libra.trainer.loss import LossSums
from libra.trainer.world import World, are_finite, sum_over_world


class FsdpScorer:
    """Micro-batches through a sharded model. Ranks run as many of them as each other."""

    def __init__(self, model: ScoringModel, vocab_size: int, *, logit_rows: int) -> None:
        """`logit_rows`: sequences whose logits may exist at once."""
        self.model = model
        self._logit_rows = logit_rows
        self._head = Head(vocab_start=0, num_valid=vocab_size, group=None)

    def logprobs(
        self, batches: Sequence[MicroBatch], *, sampling: Sampling, beat: Beat
    ) -> list[torch.Tensor]:
        scores = []
        with torch.no_grad():
            for batch in batches:
                beat()
                scores.append(self.scores(batch, sampling)[0])
        return scores

    def scores(self, batch: MicroBatch, sampling: Sampling) -> torch.Tensor:
        """float32[2, n] logprobs and entropies."""
        request = score_request(
            self._head,
            batch,
            sampling,
            logit_rows=self._logit_rows,
            vocab_slice=self._head.num_valid,
        )
        scores: torch.Tensor = self.model(batch.token_ids, request)
        return scores


class FsdpBackend:
    """One rank's shard of a transformers model and of its optimizer."""

    name = "fsdp"
    # Every pass gathers weights from all ranks.
    passes_in_step = True
    has_distributed_optimizer = True

    def __init__(  # noqa: PLR0915 - in the order in which a rank says what it does
        self, config: RunConfig, world: World, *, beat: Callable[[str], None]
    ) -> None:
        """Build with the weights of `model_path`; `beat` is told each phase.

        Raises ConfigError or DataError, on every rank alike, for what cannot be run.
        """
        if world.size != world.sizes.data:
            raise ConfigError("train_backend: fsdp knows data parallelism only")
        model_path = Path(config.model.model_path)
        self.seed(config.control.seed, 0)
        beat("load")
        language_model = load_language_model(model_path)
        self._plan = export_plan(language_model, model_path)
        self.vocab_size: int = language_model.config.vocab_size
        tied = language_model.all_tied_weights_keys
        self.has_tied_embeddings = "lm_head.weight" in tied
        mesh = init_device_mesh(world.device.type, (world.size,))
        dtype = config.training.train_dtype
        scorer = partial(
            FsdpScorer,
            vocab_size=self.vocab_size,
            logit_rows=config.training.recompute_micro_batch_size,
        )
        beat("build")
        if config.training.fsdp_gradient_checkpointing:
            checkpoint_layers(language_model)
        self._scorer = scorer(shard(language_model, mesh, dtype=dtype))
        self.model = self._scorer.model
        if whole := [n for n, p in self.model.named_parameters() if not isinstance(p, DTensor)]:
            raise InvariantError(f"these parameters are not sharded: {', '.join(whole)}")
        self.optimizer = build_optimizer(self.model, config.training)
        self.reference: Scorer | None = None
        self.reference_hash: str | None = None
        if config.algorithm.kl_coefficient:
            beat("load reference")
            reference = load_language_model(model_path).requires_grad_(requires_grad=False)
            self.reference = scorer(shard(reference, mesh, dtype=dtype))
            self.reference_hash = hash_of_weights(model_path)
        self.model_hash = hash_bytes(msgspec.json.encode(self.export_plan))
        self.arrangement = Arrangement(layout="padded", device=world.device)
        self.export_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self._max_norm = config.training.clip_grad
        self._world = world
        self._host_memory = HostMemory()

    @property
    def num_parameters(self) -> int:
        return sum(local(parameter.detach()).numel() for parameter in self.model.parameters())

    @property
    def export_plan(self) -> Sequence[HfTensor]:
        return [tensor for tensors in self._plan.values() for tensor in tensors]

    def seed(self, seed: int, step: int) -> None:
        torch.manual_seed((seed * 1_000_003 + step) % 2**31)

    def logprobs(
        self, batches: Sequence[MicroBatch], *, sampling: Sampling, beat: Beat
    ) -> list[torch.Tensor]:
        return self._scorer.logprobs(batches, sampling=sampling, beat=beat)

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss: Loss, *, sampling: Sampling, beat: Beat
    ) -> list[LossSums]:
        self.optimizer.zero_grad()
        sums = []
        for batch in batches:
            beat()
            value, of_batch = loss(self._scorer.scores(batch, sampling), batch)
            value.backward()  # type: ignore[no-untyped-call]
            sums.append(of_batch)
        return sums

    def step_if_finite(self, *, learning_rate: float) -> tuple[float, bool]:
        return step_if_finite(
            self.optimizer,
            learning_rate=learning_rate,
            max_norm=self._max_norm,
            sum_over_ranks=partial(sum_over_world, self._world),
        )

    def has_finite_weights(self) -> bool:
        return are_finite(local(parameter.detach()) for parameter in self.model.parameters())

    def hf_tensors(self, *, beat: Beat, to_cpu: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        return whole_tensors(
            self.model.language_model,
            self._plan,
            dtype=self.export_dtype,
            rank=self._world.at.rank,
            beat=beat,
            to_cpu=to_cpu,
        )

    def prepare_to_stage(self) -> None:
        # AdamW keeps two values for each weight, and a step.
        self._host_memory.prepare(
            sum(
                3 * local(parameter.detach()).nbytes + 4 * ALIGNMENT
                for parameter in self.model.parameters()
            )
        )

    def stage(self, directory: Path) -> checkpoint.StagedState:
        state = checkpoint.state_of(self.model, self.optimizer)
        return checkpoint.StagedState(state, directory, self._world.files_group, self._host_memory)

    def restore(self, directory: Path) -> None:
        checkpoint.restore(checkpoint.state_of(self.model, self.optimizer), directory)

    def restore_weights(self, directory: Path) -> None:
        checkpoint.restore(checkpoint.weights_of(self.model), directory)
