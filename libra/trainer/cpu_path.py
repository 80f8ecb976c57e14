"""Lets the real Megatron-Core run where there is no CUDA. Does nothing where there is.

Megatron-Core has no CPU path of its own: it names the device "cuda" in literals, asks
`torch.cuda` for streams and the current device, and imports triton. `enable` stands in for
exactly those, and hides Transformer Engine, so that its classes (model, schedules, optimizers,
checkpoints) run unchanged on gloo. It must be called before anything of Megatron is imported, in
the thread that will run it: a torch function mode belongs to one thread. Fitted to
megatron-core 0.19.2.
"""

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
TRITON_MODULE = "megatron.core.transformer.moe.ops.paged_stash"


def enable() -> None:
    """Prepare this process and thread; a second call, or one beside CUDA, changes nothing."""
    if torch.cuda.is_available() or isinstance(torch.cuda.current_device, _Constant):
        return
    # megatron.core.jit.jit_fuser is torch.compile, which costs a C++ compiler run per function.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # noqa: TID251 - read by torch, not by us
    # Its kernels need CUDA, and wherever it can be imported Megatron takes them.
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
    _stand_in_for_triton()
    _stand_in_for_cuda()
    _CudaLiteralsToCpu().__enter__()  # type: ignore[no-untyped-call]


class _Constant:
    """A function of any arguments that returns one value."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __call__(self, *_args: object, **_options: object) -> object:
        return self._value


class _NoStream:
    """Stands for a CUDA stream or event: every method does nothing and returns another."""

    def __init__(self, *_args: object, **_options: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., object]:
        return _NoStream


class _CudaLiteralsToCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not options:
            # Megatron tells precisions apart by comparing with 'torch.cuda.FloatTensor'.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        device = options.get("device")
        if device is not None and torch.device(device).type == "cuda":
            options["device"] = CPU
        return func(*args, **options)


def _stand_in_for_triton() -> None:
    # One module imports triton unconditionally. A fake top-level `triton` would mislead torch and
    # transformers, which probe for it; so that one module is replaced instead.
    if importlib.util.find_spec("triton") is not None:
        return
    module = types.ModuleType(TRITON_MODULE)
    for name in ("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel"):
        setattr(module, name, None)
    sys.modules.setdefault(TRITON_MODULE, module)


def _stand_in_for_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = _Constant(CPU)
    cuda.synchronize = _Constant(None)
    cuda.current_stream = _Constant(_NoStream())
    cuda.Stream = cuda.Event = _NoStream
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    # Imported here: Megatron's modules look at torch.cuda while they are being imported.
    from megatron.core.tensor_parallel import random as megatron_random  # noqa: PLC0415
    from megatron.core.transformer.moe import token_dispatcher  # noqa: PLC0415

    # What is on the CPU already is not turned into the numpy arrays that the collectives want.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # noqa: SLF001
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # noqa: SLF001
