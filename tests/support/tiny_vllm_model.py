"""A tiny random Qwen2 model with its own tokenizer, for real vLLM servers on CPU.

    python tests/support/tiny_vllm_model.py DIRECTORY [SEED]

Hidden size 128 and 4 heads give head_dim 32, the smallest that vLLM's CPU attention supports.
"""

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from weight_dirs import describe_version

VOCABULARY = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(directory: Path, *, seed: int = 0, tied: bool = False) -> None:
    """Write config, tokenizer and float32 weights (427,136 parameters) to `directory`."""
    # Imported here: together they take seconds, and most tests only change existing weights.
    import torch  # noqa: PLC0415
    from tokenizers import (  # noqa: PLC0415
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )
    from transformers import (  # noqa: PLC0415
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [f"{a} plus {b} makes {a + b}; what is next?" for a in range(60) for b in range(60)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    model.save_pretrained(directory)


def changed_weights(base: Path, *, seed: int) -> dict[str, np.ndarray]:
    """The weights of `base`, each tensor with a little noise."""
    rng = np.random.default_rng(seed)
    return {
        name: (tensor + 0.05 * rng.standard_normal(tensor.shape)).astype(tensor.dtype)
        for name, tensor in load_file(base / "model.safetensors").items()
    }


def publish_version(
    weights_directory: Path, version: int, tensors: dict[str, np.ndarray], *, run_id: str
) -> tuple[Path, str]:
    """Write `weights_directory/vNNNNNN`; returns it and its manifest hash."""
    directory = weights_directory / f"v{version:06d}"
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory, describe_version(directory, version, run_id=run_id)


if __name__ == "__main__":
    make_tiny_model(Path(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
