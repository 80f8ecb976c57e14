"""vLLM general plugin: methods of the engine process, and the engine of weight transfers.

vLLM loads it in every process through the entry point in `plugin_path/`. It uses only
`EngineCore.scheduler.requests` and `Request.num_output_tokens`, which vLLM 0.22 and 0.32 both
have. `EngineCore` utility calls are looked up by name, so a method added here can be called.
"""

from typing import Any

BEGIN_VERSION = "libra_begin_version"
COUNT_TOKENS = "libra_count_tokens"
TRANSFER_BACKEND = "libra"
"""Its name in `--weight-transfer-config`."""


def register() -> None:
    """Add the methods once per process; vLLM may call this several times."""
    from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415 - only where vLLM is
        WeightTransferEngineFactory,
    )
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - only where vLLM is

    if not hasattr(EngineCore, BEGIN_VERSION):
        # By name: torch and the group's code are loaded only where weights are transferred.
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, "libra.serving.transfer_engine", "TransferEngine"
        )
    setattr(EngineCore, BEGIN_VERSION, begin_version)
    setattr(EngineCore, COUNT_TOKENS, count_tokens)


def begin_version(core: Any, version: int) -> dict[str, int]:
    """Count each unfinished request's output tokens; the engine must be paused.

    Requests and counts are the engine's own, so none is missing and none is ahead of what it has
    sent. Also sets vLLM's weight label where it has one (0.32).
    """
    if not core.is_scheduler_paused():
        raise RuntimeError("a policy version may begin only while the engine is paused")
    if hasattr(core, "set_weight_version"):
        core.set_weight_version(str(version))
    return count_tokens(core)


def count_tokens(core: Any) -> dict[str, int]:
    """Count each unfinished request's output tokens. Runs between two steps of the engine."""
    return {
        request_id: request.num_output_tokens
        for request_id, request in core.scheduler.requests.items()
    }
