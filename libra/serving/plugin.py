"""vLLM general plugin: methods of the engine process, transfers of weights, waiting, experts.

vLLM loads it in every process through the entry point in `plugin_path/`. It uses only
`EngineCore.scheduler.requests` and `Request.num_output_tokens`, which vLLM 0.22 and 0.32 both
have. `EngineCore` utility calls are looked up by name, so a method added here can be called.
"""

from functools import wraps
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
    from vllm.platforms import current_platform  # noqa: PLC0415 - only where vLLM is
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - only where vLLM is

    if current_platform.is_cpu():
        wait_without_yielding()
        pack_experts_anew()
    if not hasattr(EngineCore, BEGIN_VERSION):
        # By name: torch and the group's code are loaded only where weights are transferred.
        WeightTransferEngineFactory.register_engine(
            TRANSFER_BACKEND, "libra.serving.transfer_engine", "TransferEngine"
        )
    setattr(EngineCore, BEGIN_VERSION, begin_version)
    setattr(EngineCore, COUNT_TOKENS, count_tokens)


def wait_without_yielding() -> None:
    """Let the queues between an engine and its workers sleep while they wait, not sched_yield().

    Where engines share cores with everything else, processes that yield to each other in a loop
    keep other tasks from running for seconds on Linux 6.18, whose scheduler puts a yielding task
    behind all that run. Seen there: a supervisor that wakes every 50 ms was late by 2 s, for as
    long as an engine with a worker process generated. Sleeping costs about 60 us per message.
    """
    from vllm.distributed import utils  # noqa: PLC0415 - only where vLLM is

    utils.USE_SCHED_YIELD = False


def pack_experts_anew() -> None:
    """Have experts that are loaded again be packed as they were the first time.

    On CPU vLLM 0.32 pads and packs them once, when it makes their kernel, and copies those of later
    versions as they come over the packed ones: an error where sizes differ, else other weights.
    """
    from vllm.model_executor.layers.fused_moe import (  # noqa: PLC0415 - only where vLLM is
        unquantized_fused_moe_method as experts,
    )

    set_up = experts.UnquantizedFusedMoEMethod._setup_kernel  # noqa: SLF001 - vLLM has no other way
    if hasattr(set_up, "__wrapped__"):
        return

    @wraps(set_up)
    def set_up_anew(method: Any, *arguments: Any, **named: Any) -> None:
        method.moe_kernel = None
        set_up(method, *arguments, **named)

    experts.UnquantizedFusedMoEMethod._setup_kernel = set_up_anew  # noqa: SLF001


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
