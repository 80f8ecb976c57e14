"""What an engine's worker processes do for Libra; vLLM mixes the class into its Worker.

Named by `--worker-extension-cls`; methods are called by name with `collective_rpc`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from libra.transfer.outcome import TransferOutcome, outcome_of

REFRESH_TIED_HEADS = "libra_refresh_tied_heads"
JOIN_TRANSFER = "libra_join_transfer"
RECEIVE_WEIGHTS = "libra_receive_weights"


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

    # Both answer instead of raising: one worker's error would hide what the others say.

    def libra_join_transfer(self, transfer: bytes, rank_offset: int) -> dict[str, Any]:
        """Join a group, as `libra.serving.transfer_engine.JoinInfo`; see TransferOutcome."""
        return self._libra_tried(partial(self._libra_join, transfer, rank_offset))

    def libra_receive_weights(self, transfer: bytes, nonce: str) -> dict[str, Any]:
        """Receive a version and load it; see TransferOutcome.

        After a failure the weights may be anything, and can be loaded again.
        """
        return self._libra_tried(partial(self._libra_receive, transfer, nonce))

    def _libra_join(self, transfer: bytes, rank_offset: int) -> str:
        self.init_weight_transfer_engine({"transfer": transfer, "rank_offset": rank_offset})  # type: ignore[attr-defined]
        return ""

    def _libra_receive(self, transfer: bytes, nonce: str) -> str:
        self.start_weight_update()  # type: ignore[attr-defined]
        try:
            self.update_weights({"transfer": transfer, "nonce": nonce})  # type: ignore[attr-defined]
        except BaseException:
            self._libra_end_update()
            raise
        self.finish_weight_update()  # type: ignore[attr-defined]
        checksum: str = self.weight_transfer_engine.checksum  # type: ignore[attr-defined]
        return checksum

    def _libra_end_update(self) -> None:
        """Bring layers that got a part of their weights to where the next load can begin.

        Else the next one would count that part as its own, and leave it in place.
        """
        # vLLM 0.32 takes its own note away when it raises, 0.22 leaves it.
        self._weight_update_active = True
        self.finish_weight_update()  # type: ignore[attr-defined]

    def _libra_tried(self, work: Callable[[], str]) -> dict[str, Any]:
        try:
            return TransferOutcome(checksum=work()).as_builtins()
        except Exception as error:  # noqa: BLE001 - the top of the call; the server says it
            failed = outcome_of(error)
            self.weight_transfer_engine.abort(failed.error)  # type: ignore[attr-defined]
            return failed.as_builtins()


def _refresh(head: Any, embeddings: set[int]) -> None:
    if head.weight.data_ptr() not in embeddings:
        raise RuntimeError("the model has tied embeddings, but its head has weights of its own")
    head.quant_method.process_weights_after_loading(head)
