"""The whole job on two GPUs, one to train and one to serve, on a Qwen2 of a given shape.

    main_job.py OUT [--shape tiny|0.5b|1.8b] [--steps N] [-o KEY=VALUE]...

Makes a model with random weights (the quickstart's tokenizer and prompts), runs the job through the
command line, and prints one JSON object with what metrics.jsonl and reloads.jsonl say. Where
CUDA_VISIBLE_DEVICES is `0,0` both share one GPU. Not part of CI: it needs CUDA, a vLLM for CUDA and
Megatron-Core.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHAPES = {
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "vocab_size": 112,
    },
    "0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
    },
    "1.8b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
    },
}
MEDIANS = (
    *("step_s", "rollout_wait_s", "recompute_s", "train_s", "export_s", "reload_s"),
    "publish_wait_s",
    *("tokens_per_s", "response_tokens_mean", "kl_mismatch"),
)
WARM_UP_STEPS = 3
GIB = 2**30
KV_CACHE_BYTES = 8 * GIB
"""Of a server that shares its GPU: one that measures its own takes what its neighbour allocates
meanwhile for its own."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("-o", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    quickstart = options.out / "quickstart"
    subprocess.run([sys.executable, ROOT / "scripts/make_quickstart.py", quickstart], check=True)
    model = quickstart / "model"
    first, second, *others = gpus()
    slots = ",".join([first, second, *others])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": slots}
    os.environ["CUDA_VISIBLE_DEVICES"] = first
    if options.shape != "tiny":
        model = make_model(options.out / f"model-{options.shape}", model, options.shape)
    shared = [f"rollout_kv_cache_bytes={KV_CACHE_BYTES}", "gpu_memory_utilization=0.4"]
    overrides = [*(shared if first == second else ()), *options.overrides]
    run_dir = options.out / f"run-{options.shape}-{time.strftime('%H%M%S')}"
    command = [
        *(sys.executable, "-m", "libra_supervisor.cli", "run"),
        *(str(ROOT / "configs/quickstart.yaml"), "--run-dir", str(run_dir)),
        *("-o", f"model_path={model}", "-o", f"tokenizer_path={quickstart / 'model'}"),
        *("-o", f"train_data={quickstart / 'train.jsonl'}"),
        *("-o", "device=cuda", "-o", "train_gpus=1", "-o", "rollout_gpus=1"),
        *("-o", "heterogeneous_rollout.instances=[{tp: 1, count: 1}]"),
        *("-o", f"total_steps={options.steps}", "-o", "save_interval=0"),
        *(part for override in overrides for part in ("-o", override)),
    ]
    started_at = time.monotonic()
    code = subprocess.run(command, env=environment, check=False).returncode
    print(json.dumps(summary(run_dir, code, time.monotonic() - started_at)))
    return code


def gpus() -> list[str]:
    """Those of CUDA_VISIBLE_DEVICES by slot, a server's first; one GPU may be named for several."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")


def make_model(directory: Path, tokenizer: Path, shape: str) -> Path:
    """A directory in Hugging Face format with random bfloat16 weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if (directory / "config.json").exists():
        return directory
    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPES[shape],
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, directory / name)
    return directory


def summary(run_dir: Path, code: int, wall_s: float) -> dict:
    steps = lines(run_dir / "metrics.jsonl")
    reloads = lines(run_dir / "reloads.jsonl")
    late = steps[WARM_UP_STEPS:] or steps
    return {
        "exit_code": code,
        "wall_s": round(wall_s, 1),
        "num_steps": len(steps),
        "kl_mismatch_step_1": steps[0]["kl_mismatch"] if steps else None,
        "reward_first_last": [s["reward_mean"] for s in (steps[:1] + steps[-1:])],
        "median": {key: statistics.median(s[key] for s in late) for key in MEDIANS if late},
        "trainer_peak_memory_gib": max(
            (s["trainer_peak_memory_bytes"] / GIB for s in steps), default=0
        ),
        "probe_difference_max": max((r["probe_difference"] for r in reloads), default=None),
        "reload_total_s": [round(r["total_s"], 3) for r in reloads[:3]],
    }


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
