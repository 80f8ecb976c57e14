"""The Megatron-Core backend: `libra.trainer.backend.TrainBackend` over its model and optimizer."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from libra.config.run import RunConfig
from libra.storage.digest import hash_of_weights
from libra.trainer import megatron_checkpoint
from libra.trainer.architecture import Architecture, read_architecture
from libra.trainer.backend import Beat, HfTensor, Loss, Scorer, StagedState
from libra.trainer.batch import Arrangement, Layout, MicroBatch
from libra.trainer.capabilities import fallbacks, refuse_unsupported
from libra.trainer.head import Sampling
from libra.trainer.hf_weights import gather_hf_tensors, load_hf_weights
from libra.trainer.host_memory import HostMemory
from libra.trainer.hybrid_gradients import GradientView
from libra.trainer.loss import LossSums
from libra.trainer.model import GradientSeam, build_model, seed_everything, with_gradients
from libra.trainer.optimizer import build_optimizer, step_if_finite, step_with
from libra.trainer.pipeline import Pipeline
from libra.trainer.tensor_map import model_rules
from libra.trainer.world import World, are_finite


class MegatronBackend:
    """Tensor, pipeline, context, expert and data parallelism."""

    name = "megatron_core"

    def __init__(
        self,
        config: RunConfig,
        world: World,
        *,
        beat: Callable[[str], None],
        layout: Layout | None = None,
    ) -> None:
        """Build this rank's part with the weights of `model_path`; `beat` is told each phase.

        `layout` overrides the choice of `arrange`. Raises ConfigError or DataError, on every rank
        alike, for what cannot be run.
        """
        model_path = Path(config.model.model_path)
        architecture = read_architecture(model_path)
        refuse_unsupported(config, architecture, world.sizes, is_cuda=world.device.type == "cuda")
        for notice in fallbacks(config, architecture, is_cuda=world.device.type == "cuda"):
            logging.getLogger(__name__).warning(notice)
        self.architecture = architecture
        self.seed(config.control.seed, 0)
        beat("build")
        model = build_model(config, architecture, world)
        beat("load")
        load_hf_weights(model, architecture, model_path, world)
        self.seam = GradientSeam()
        self.model = with_gradients(model, config, self.seam)
        self.gradients = GradientView(self.model)
        self.optimizer = build_optimizer(self.model, config)
        self.reference: Scorer | None = None
        self.reference_hash: str | None = None
        if config.algorithm.kl_coefficient:
            beat("load reference")
            # Always the base model, never the weights a resumed run begins with.
            self.reference = _reference(config, architecture, world, model_path)
            self.reference_hash = hash_of_weights(model_path)
        self.policy = _pipeline(self.model, config, architecture, world)
        self.arrangement = arrange(config, world, layout)
        self.vocab_size = architecture.vocab_size
        self.model_hash = architecture.hash
        self.has_tied_embeddings = architecture.has_tied_embeddings
        # Experts are exchanged within a micro-batch.
        self.passes_in_step = world.sizes.expert > 1
        self.has_distributed_optimizer = config.megatron.megatron_use_distributed_optimizer
        self._world = world
        self._host_memory = HostMemory()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def export_dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self.model.parameters()).dtype
        return dtype

    @property
    def export_plan(self) -> Sequence[HfTensor]:
        return [source for rule in model_rules(self.architecture) for source in rule.sources]

    def seed(self, seed: int, step: int) -> None:
        seed_everything(seed, step)

    def logprobs(
        self, batches: Sequence[MicroBatch], *, sampling: Sampling, beat: Beat
    ) -> list[torch.Tensor]:
        return self.policy.logprobs(batches, sampling=sampling, beat=beat)

    def forward_backward(
        self, batches: Sequence[MicroBatch], loss: Loss, *, sampling: Sampling, beat: Beat
    ) -> list[LossSums]:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self.policy.forward_backward(batches, loss, sampling=sampling, beat=beat)

    def step_if_finite(self, *, learning_rate: float) -> tuple[float, bool]:
        return step_if_finite(self.optimizer, learning_rate=learning_rate)

    def step_with(self, norm: float, *, learning_rate: float) -> None:
        step_with(self.optimizer, norm, learning_rate=learning_rate)

    def has_finite_weights(self) -> bool:
        return are_finite(parameter.detach() for parameter in self.model.parameters())

    def hf_tensors(self, *, beat: Beat, to_cpu: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        return gather_hf_tensors(
            self.model, self.architecture, self._world, beat=beat, to_cpu=to_cpu
        )

    def prepare_to_stage(self) -> None:
        has_main_weights = self.has_distributed_optimizer or self.export_dtype != torch.float32
        size = megatron_checkpoint.num_state_bytes(self.model, has_main_weights=has_main_weights)
        self._host_memory.prepare(size)

    def stage(self, directory: Path) -> StagedState:
        return megatron_checkpoint.stage(self.model, self.optimizer, directory, self._host_memory)

    def restore(self, directory: Path) -> None:
        megatron_checkpoint.restore(
            self.model,
            self.optimizer,
            directory,
            has_distributed_optimizer=self.has_distributed_optimizer,
        )

    def restore_weights(self, directory: Path) -> None:
        megatron_checkpoint.restore_weights(self.model, directory)


def arrange(config: RunConfig, world: World, layout: Layout | None = None) -> Arrangement:
    """Choose how sequences are laid out on this rank.

    Packed where a kernel for it is there (CUDA, bfloat16) and where context parallelism needs it;
    else padded rows, which cost a CPU less than attention sequence by sequence.
    """
    has_kernel = world.device.type == "cuda" and config.training.train_dtype == "bfloat16"
    if layout is None:
        layout = "packed" if has_kernel or world.sizes.context > 1 else "padded"
    # Sequence parallelism cuts the columns evenly.
    is_cut = config.megatron.megatron_sequence_parallel
    return Arrangement(
        layout=layout,
        device=world.device,
        length_multiple=world.sizes.tensor if is_cut else 1,
        context_size=world.sizes.context,
        context_index=world.at.context,
        context_group=world.context_group,
    )


def _reference(
    config: RunConfig, architecture: Architecture, world: World, model_path: Path
) -> Pipeline:
    model = build_model(config, architecture, world)
    load_hf_weights(model, architecture, model_path, world)
    model.requires_grad_(False)
    return _pipeline(model, config, architecture, world)


def _pipeline(model: Any, config: RunConfig, architecture: Architecture, world: World) -> Pipeline:
    rows = config.training.recompute_micro_batch_size
    return Pipeline(model, architecture, world, logit_rows=rows)
