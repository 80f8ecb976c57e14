"""What only a GPU can show: kernels against references, layouts against each other.

    trainer_checks.py OUT

Needs CUDA. Prints one JSON object per check and ends with an error when one is off.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]


def main() -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    from tiny_models import make_tiny_model
    from trainer_ranks import joined_world, run_config

    out = Path(sys.argv[1])
    model = out / "model-checks"
    if not model.exists():
        make_tiny_model(model, "qwen2", hidden_size=256, num_attention_heads=4, vocab_size=5003)
    with joined_world(run_config(model, device="cuda")) as world:
        check_head_kernels()
        check_packed_attention()
        check_learning(model, world)


def check_head_kernels() -> None:
    """Against float64, with padding columns full of garbage and targets of other ranks."""
    import torch

    from libra.trainer.head_kernels import gradients_in_place, row_sums

    torch.manual_seed(0)
    rows, columns, num_valid, temperature = 37, 9000, 8777, 0.7
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 1e-2)):
        logits = (torch.randn(rows, columns, device="cuda") * 5).to(dtype)
        logits[:, num_valid:] = float("nan")
        targets = torch.randint(-100, columns, (rows,), device="cuda")
        exact = logits[:, :num_valid].double() / temperature
        largest, total, weighted, target = row_sums(
            logits, targets, num_valid=num_valid, temperature=temperature
        )
        log_sum = total.log() + largest
        entropy = log_sum - weighted / total
        p = exact.softmax(-1)
        exact_entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
        is_here = (targets >= 0) & (targets < num_valid)
        column = targets.clamp(0, num_valid - 1)[:, None]
        exact_target = torch.where(is_here, exact.gather(1, column)[:, 0], 0.0)
        of_logprob, of_entropy = torch.randn(2, rows, device="cuda")
        one_hot = torch.zeros_like(exact).scatter_(1, column, is_here[:, None].double())
        wanted = of_logprob[:, None] * (one_hot - p)
        wanted -= of_entropy[:, None] * p * (p.clamp(min=1e-300).log() + exact_entropy[:, None])
        got = gradients_in_place(
            logits.clone(),
            targets,
            (log_sum, entropy, of_logprob, of_entropy),
            num_valid=num_valid,
            temperature=temperature,
        )
        report(
            f"head kernels {dtype}",
            {
                "log_sum": relative(log_sum, exact.logsumexp(-1)),
                "entropy": relative(entropy, exact_entropy),
                "target": relative(target, exact_target),
                "gradient": relative(got[:, :num_valid], wanted / temperature),
                "padding": float(got[:, num_valid:].float().abs().max()),
            },
            tolerance,
        )


def check_packed_attention() -> None:
    import torch

    from libra.trainer.columns import packed_columns
    from libra.trainer.layers import SdpaAttention

    torch.manual_seed(1)
    lengths = [1, 200, 77, 513, 16]
    sequences = [torch.zeros(n, dtype=torch.int32).numpy() for n in lengths]
    device = torch.device("cuda")
    packing = packed_columns(
        sequences, device=device, length_multiple=1, context=(1, 0, None)
    ).packing
    attention = SdpaAttention(None, softmax_scale=0.11)
    total = sum(lengths)
    for heads, kv_heads, dim in ((14, 2, 64), (12, 2, 128), (9, 3, 64)):
        inputs = [
            torch.randn(total, 1, count, dim, device=device)
            for count in (heads, kv_heads, kv_heads)
        ]
        factors = torch.randn(total, 1, heads * dim, device=device)
        results = []
        for dtype in (torch.float32, torch.bfloat16):
            given = [tensor.to(dtype).requires_grad_() for tensor in inputs]
            output = attention(*given, packed_seq_params=packing)
            results.append([output, *torch.autograd.grad((output * factors).sum(), given)])
        names = ("output", "query", "key", "value")
        differences = {
            name: relative(got, wanted) for name, wanted, got in zip(names, *results, strict=True)
        }
        report(f"packed attention {heads}/{kv_heads} heads of {dim}", differences, 1.5e-2)


def check_learning(model: Path, world) -> None:
    """The same steps packed and padded, in bfloat16, and padded in float32."""
    from libra.trainer.assembly import assemble
    from trainer_ranks import make_samples, no_beat, run_config, train_step

    found = {}
    for dtype, layout in (
        ("float32", "padded"),
        ("bfloat16", "padded"),
        ("bfloat16", "packed"),
    ):
        config = run_config(
            model, device="cuda", train_dtype=dtype, micro_batch_size=5, entropy_coefficient=0.01
        )
        trainer = assemble(config, world, beat=no_beat, layout=layout)
        steps = []
        for step in (1, 2, 3):
            samples = make_samples(step, 16, 5003)
            command = train_step(step, [samples[:8], samples[8:]], dp_rank=0, dp_size=1)
            metrics = trainer.learner.train(command)
            steps.append((metrics.loss, metrics.grad_norm, metrics.entropy, metrics.kl_mismatch))
        found[f"{dtype} {layout}"] = steps
    import torch

    wanted = torch.tensor(found.pop("float32 padded"))
    for name, steps in found.items():
        report(f"learning {name}", {"steps": relative(torch.tensor(steps), wanted)}, 2e-2)


def relative(got, wanted) -> float:
    difference = (got.double() - wanted.double()).norm() / wanted.double().norm()
    return float(difference)


def report(what: str, differences: dict[str, float], tolerance: float) -> None:
    print(json.dumps({"check": what, "tolerance": tolerance, **differences}), flush=True)
    for name, difference in differences.items():
        assert difference <= tolerance, f"{what}: {name} differs by {difference}"


if __name__ == "__main__":
    main()
