"""A transformers model that answers with scores of chosen tokens, and how it is sharded."""

from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from libra.errors import ConfigError, DataError
from libra.trainer.head import ScoreRequest, token_scores

HEAD_PROBE: Final = 4
"""Tokens that tell whether the head is what we take it for."""

HEAD_TOLERANCE: Final = 1e-4


class ScoringModel(torch.nn.Module):
    """Padded rows [b, s] of token ids -> float32[2, n], logprobs and entropies.

    The head is applied to the requested positions only, inside this module's forward: there the
    output weight is whole.
    """

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, token_ids: torch.Tensor, request: ScoreRequest) -> torch.Tensor:
        # Without a mask: rows end in padding, which a causal model hides from real tokens.
        output = self.language_model.base_model(input_ids=token_ids, use_cache=False)
        num_rows, num_columns = token_ids.shape
        # Positions are those of [s, b], hidden states are [b, s, h].
        rows, columns = request.positions % num_rows, request.positions // num_rows
        hidden = output.last_hidden_state.flatten(0, 1)
        chosen = hidden.index_select(0, rows * num_columns + columns)
        return token_scores(chosen, self.language_model.get_output_embeddings().weight, request)


def load_language_model(model_path: Path) -> Any:
    """Read a causal language model, whole and in float32, on the CPU.

    Raises DataError when transformers cannot read it, ConfigError when its logits are not those of
    its output weight alone.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{model_path}: transformers cannot read this model: {error}") from error
    # Dropout would make the trainer another policy than the engine.
    model.eval()
    _refuse_other_heads(model, model_path)
    return model


def _refuse_other_heads(model: Any, model_path: Path) -> None:
    """Compare the model's own logits with what `token_scores` is going to compute.

    Scaled or capped logits and heads with a bias would be trained silently as if they were not.
    """
    tokens = torch.arange(HEAD_PROBE)[None] % model.config.vocab_size
    head = model.get_output_embeddings()
    with torch.no_grad():
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        wanted = model(input_ids=tokens, use_cache=False).logits
        got = linear(hidden, head.weight)
    difference = float((wanted - got).abs().max())
    if difference > HEAD_TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise ConfigError(
            f"{model_path}: the logits of {type(model).__name__} are not its hidden states times "
            f"its output weight (they differ by {difference:.2g}); train_backend: fsdp cannot "
            "train it"
        )


def checkpoint_layers(language_model: Any) -> None:
    """Have each layer keep its input only and run again in the backward pass.

    To be called before `shard`, so that the second run finds the layer's weights gathered.
    transformers' own switch would need the model in training mode, and so its dropout. Raises
    ConfigError where the model does not say what its layers are.
    """
    if not (layers := _layers(language_model)):
        raise ConfigError(
            f"{type(language_model).__name__} does not name its layers (_no_split_modules); set "
            "fsdp_gradient_checkpointing: false"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _layers(language_model: Any) -> list[Any]:
    names = set(language_model._no_split_modules or ())  # noqa: SLF001 - its only name
    return [module for module in language_model.modules() if type(module).__name__ in names]


def shard(
    language_model: Any, mesh: DeviceMesh, *, dtype: Literal["float32", "bfloat16"]
) -> ScoringModel:
    """Spread the parameters over the ranks of `mesh`; each layer is whole only while it runs.

    Main weights stay float32 and gradients are summed in float32 over the ranks; forward and
    backward run in `dtype`.
    """
    options: dict[str, Any] = {"mesh": mesh}
    if dtype == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    whole = ScoringModel(language_model)
    for layer in _layers(language_model):
        fully_shard(layer, **options)
    # Also the root lets go after each forward: else weights gathered for a pass without backward
    # would still be there, and stale, after the next optimizer step.
    fully_shard(whole, reshard_after_forward=True, **options)
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            # The loss has the global counts in it: gradients are summed, never averaged.
            module.set_gradient_divide_factor(1.0)
            # gloo knows plain sums only.
            module.set_force_sum_reduction_for_comms(enable=True)
    return whole
