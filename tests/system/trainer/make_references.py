"""Writes what transformers computes for a tiny model: logits, logprobs, and their gradients.

python make_references.py DIRECTORY KIND... reads DIRECTORY/KIND and writes KIND.safetensors there.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

TEMPERATURE = 0.7
NUM_ROWS, NUM_TOKENS = 3, 17


def tokens_and_weights(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[rows, tokens], and float32[rows, tokens - 1] weights of each next token's logprob."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, vocab_size, (NUM_ROWS, NUM_TOKENS), generator=generator)
    return tokens, torch.randn(NUM_ROWS, NUM_TOKENS - 1, generator=generator)


def as_in_the_files(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """transformers holds all experts of a layer in one tensor; files hold them one by one."""
    prefix, _, kind = name.rpartition(".")
    if kind not in {"gate_up_proj", "down_proj"}:
        return [(name, tensor.clone())]
    found = []
    for expert, of_expert in enumerate(tensor):
        halves = of_expert.chunk(2) if kind == "gate_up_proj" else [of_expert]
        kinds = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
        found += [
            (f"{prefix}.{expert}.{k}.weight", half.clone())
            for k, half in zip(kinds, halves, strict=True)
        ]
    return found


def main() -> None:
    directory = Path(sys.argv[1])
    for kind in sys.argv[2:]:
        write_reference(directory / kind, directory / f"{kind}.safetensors")


def write_reference(model_directory: Path, output: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        model_directory, dtype=torch.float32, attn_implementation="eager"
    )
    tokens, weights = tokens_and_weights(model.config.vocab_size)
    logits = model(tokens).logits
    scaled = torch.log_softmax(logits[:, :-1] / TEMPERATURE, dim=-1)
    logprobs = scaled.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    entropies = -(scaled.exp() * scaled).sum(-1)
    # Both outputs of the head are in the loss, so that both gradients are compared.
    ((logprobs + 0.3 * entropies) * weights).sum().backward()
    gradients = {
        f"gradient.{name}": gradient.contiguous()
        for own_name, parameter in model.named_parameters()
        for name, gradient in as_in_the_files(own_name, parameter.grad)
    }
    save_file(
        {
            "logits": logits.detach().contiguous(),
            "logprobs": logprobs.detach().contiguous(),
            "entropies": entropies.detach().contiguous(),
        }
        | gradients,
        output,
    )


if __name__ == "__main__":
    main()
