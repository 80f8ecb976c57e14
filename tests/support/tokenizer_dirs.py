"""Small tokenizers on disk, as Hugging Face lays them out."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
MERGES = [("H", "A"), ("HA", "V"), ("I", "N"), ("IN", "G"), ("HAV", "ING")]


def write_tokenizer(directory, *, template=CHATML, adds_bos=False, config=None):
    """A byte-level BPE over ASCII that merges HAVING; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = [*SPECIAL, *map(chr, range(33, 127)), "\u0120", "\u010a"]
    texts += ["".join(m) for m in MERGES]
    vocabulary = {text: i for i, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    if adds_bos:
        bos = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[bos]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}, **(config or {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory
