"""Write the quickstart's model, tokenizer and prompts.

    make_quickstart.py OUT [--seed N]

OUT/model is a Qwen2 of two layers with random weights and a tokenizer of its own: a byte-level BPE
over printable ASCII with a chat template. OUT/train.jsonl asks for eight characters of one class
("digits", "capitals:", ...); OUT/eval.jsonl asks in words the training prompts do not use. Nothing
in the model knows the task: it answers at random until it has been trained.

The whole directory appears at once; when it is there and made by the same recipe, nothing happens.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

RECIPE = 1
"""Raise it when the output changes, so that old directories are made again."""

MARKER = "complete"
PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
SPECIAL_TOKENS = (PAD, START, END, UNKNOWN)
WORDS = ("user", "assistant", "system", "digits", "capitals", "letters", "symbols")
"""Tokens of their own, so that the class a prompt asks for is one token."""

CLASSES = ("digits", "capitals", "letters", "symbols")
TRAIN_FORMS = ("{}", "{}!", "{}.", "{}:", "> {}", "- {}", "* {}", "# {}")
EVAL_FORMS = ("{}?", "= {}", "({})")
VOCAB_SIZE = 112
"""Above the 107 tokens in use: divisible by 16, so tensor-parallel shards are equal."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    out: Path = arguments.out
    recipe = {"recipe": RECIPE, "seed": arguments.seed}
    if is_made(out, recipe):
        print(f"{out} is there already")
        return
    refuse_foreign(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        write_all(partial, arguments.seed)
        seal(partial, recipe)
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"wrote {out}")


def is_made(out: Path, recipe: dict[str, int]) -> bool:
    """Whether `out` holds what this recipe writes, byte for byte."""
    try:
        marker = json.loads((out / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return marker.get("made_by") == recipe and marker.get("files") == digests(out)


def refuse_foreign(out: Path) -> None:
    if out.exists() and not (out / MARKER).exists() and any(out.iterdir()):
        sys.exit(f"{out} exists and was not made by this script; name another directory")


def digests(directory: Path) -> dict[str, str]:
    files = (p for p in sorted(directory.rglob("*")) if p.is_file() and p.name != MARKER)
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
    }


def seal(directory: Path, recipe: dict[str, int]) -> None:
    """Write the marker after everything else has reached the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            flush(path)
    marker = directory / MARKER
    marker.write_text(json.dumps({"made_by": recipe, "files": digests(directory)}, indent=1))
    flush(marker)
    # mkdtemp made the directory for this user alone; what it holds is no secret.
    directory.chmod(0o755)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(directory: Path, seed: int) -> None:
    write_model(directory / "model", seed)
    write_prompts(directory / "train.jsonl", TRAIN_FORMS)
    write_prompts(directory / "eval.jsonl", EVAL_FORMS)


def write_prompts(path: Path, forms: tuple[str, ...]) -> None:
    rows = [{"prompt": form.format(name), "answer": name} for form in forms for name in CLASSES]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(directory: Path, seed: int) -> None:
    # Imported here: --help and an up-to-date directory should not cost the seconds it takes.
    import torch  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(),
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        # Larger than usual: with 0.02 the prompt hardly moves the answers of so small a model.
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)


def build_tokenizer() -> Any:
    """Byte-level BPE without merges over printable ASCII, plus WORDS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    # Byte-level BPE writes a space as G with a dot and a newline as C with a dot.
    characters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens(list(WORDS))
    return tokenizer


if __name__ == "__main__":
    main()
