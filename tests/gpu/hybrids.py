"""A core with hybrid replicas that come and go learns what it learns alone, on GPUs.

    hybrids.py OUT [CASE...]

The cases are those of tests/system/trainer/test_hybrid.py, of their tiny models, with `device:
cuda`: gradients go from the replicas' GPU through the host into the core's. Core and replicas share
one GPU where CUDA_VISIBLE_DEVICES names one, else a replica of one rank has the second; those of
two ranks need two GPUs, which core and replica then share, or what `one_gpu` says. Needs CUDA and
pytest; ends with an error when a case fails.
"""

import os
import shutil
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support"), str(ROOT / "tests/system/trainer")]

import test_hybrid as cases  # noqa: E402 - after the path is set

from tiny_models import make_tiny_model  # noqa: E402
from trainer_gang import Program  # noqa: E402
from trainer_ranks import run_config  # noqa: E402

DISTRIBUTED = {"megatron_use_distributed_optimizer": True}


def main() -> None:
    out = Path(sys.argv[1])
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    wanted = sys.argv[2:]
    models = {kind: out / "hybrid-models" / kind for kind in cases.KINDS_USED}
    for kind, path in models.items():
        if not path.exists():
            make_tiny_model(path, kind)
    on_gpus = partial(run_config, device="cuda")
    for name, case in cases_on(gpus).items():
        if wanted and name not in wanted:
            continue
        print(name, flush=True)
        began_at = time.monotonic()
        directory = out / "hybrids" / name.replace(" ", "_")
        shutil.rmtree(directory, ignore_errors=True)
        with patch.object(cases, "run_config", on_gpus):
            cases.test_a_core_with_hybrids_learns_what_it_learns_alone(models, directory, case)
        print(f"as alone, in {time.monotonic() - began_at:.0f} s", flush=True)


def cases_on(gpus: list[str]) -> Mapping[str, cases.Case]:
    other = Program(environment={"CUDA_VISIBLE_DEVICES": gpus[-1]})
    found = {
        "one rank": cases.Case(program=other),
        "tcp": cases.Case(program=other, over_tcp=True),
        "two replicas, distributed optimizer, two mini-batches": cases.Case(
            program=other, num_replicas=2, num_mini_batches=2, options=DISTRIBUTED
        ),
        "bfloat16": cases.Case(program=other, options={"train_dtype": "bfloat16"}),
    }
    if len(set(gpus)) > 1 or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        found |= {
            "tp 2": cases.Case(2, 2, options={"train_tp_size": 2}),
            "dp 2, two replicas": cases.Case(
                2, program=other, num_replicas=2, num_mini_batches=2, options=DISTRIBUTED
            ),
            "pp 2, tied embeddings": cases.Case(
                2, 2, kind="qwen2_tied", options={"train_pp_size": 2} | DISTRIBUTED
            ),
        }
    return found


if __name__ == "__main__":
    main()
