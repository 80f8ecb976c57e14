"""What an engine's worker processes do for Libra; vLLM mixes the class into its Worker.

Named by `--worker-extension-cls`; methods are called by name with `collective_rpc`.
"""

from typing import Any

REFRESH_TIED_HEADS = "libra_refresh_tied_heads"


class WorkerExtension:
    """Methods beside vLLM's own; `get_model` is the Worker's."""

    def libra_refresh_tied_heads(self) -> int:
        """Process every tied LM head again after a reload; returns how many there are.

        A checkpoint with tied embeddings holds no head, so `reload_weights` processes the
        embedding alone. On CPU vLLM computes logits from a packed copy of the head, which would
        stay that of the weights before. Elsewhere head and embedding share their memory and this
        changes nothing. Raises RuntimeError when they do not.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: PLC0415 - only where vLLM is
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        modules = list(self.get_model().modules())  # type: ignore[attr-defined]
        heads = [module for module in modules if isinstance(module, ParallelLMHead)]
        embeddings = {
            module.weight.data_ptr()
            for module in modules
            if isinstance(module, VocabParallelEmbedding) and module not in heads
        }
        for head in heads:
            _refresh(head, embeddings)
        return len(heads)


def _refresh(head: Any, embeddings: set[int]) -> None:
    if head.weight.data_ptr() not in embeddings:
        raise RuntimeError("the model has tied embeddings, but its head has weights of its own")
    head.quant_method.process_weights_after_loading(head)
