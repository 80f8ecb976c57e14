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
        f"gradient.{name}": parameter.grad.clone() for name, parameter in model.named_parameters()
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
