"""Lets the ranks of one model share a GPU, for tensor parallelism on a machine that has one.

Python runs this at its start when the directory is on PYTHONPATH. It needs an NCCL that knows
`NCCL_MULTI_RANK_GPU_ENABLE=1` (2.31 does, 2.28 refuses two ranks on one GPU). In ranks and servers
`CUDA_VISIBLE_DEVICES=0,0`, in which CUDA sees no device, becomes `0`; trainer ranks then take the
GPU by themselves, and a vLLM worker is told that there are enough and that its own is the first.
What such a run shows is that the parts fit: its speed says nothing, since the ranks take turns.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

VISIBLE = "CUDA_VISIBLE_DEVICES"
SET_FOR_CHILDREN = ("LOCAL_RANK", "LIBRA_INSTANCE_ID")
"""Unlike these, the supervisor counts slots in the variable."""
ENOUGH = 8


def share_platform(module: ModuleType) -> None:
    module.CudaPlatformBase.device_count = classmethod(lambda cls: ENOUGH)


def share_worker(module: ModuleType) -> None:
    module.torch.accelerator.device_count = lambda: ENOUGH
    init_device = module.Worker.init_device

    def on_first_device(self) -> None:
        self.local_rank = 0
        init_device(self)

    module.Worker.init_device = on_first_device


AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "vllm.platforms.cuda": share_platform,
    "vllm.v1.worker.gpu_worker": share_worker,
}


class Hook(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = AFTER_IMPORT.pop(fullname, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(fullname)
        load = spec.loader.exec_module

        def load_changed(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_changed
        return spec


def main() -> None:
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return
    sys.meta_path.insert(0, Hook())
    if any(name in os.environ for name in SET_FOR_CHILDREN):
        os.environ[VISIBLE] = os.environ.get(VISIBLE, "0").partition(",")[0]


main()
