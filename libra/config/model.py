"""What is trained: the policy model and its tokenizer."""

from libra.config.base import Config, PathText


class ModelConfig(Config, frozen=True, kw_only=True):
    """Flat keys of the policy model."""

    model_path: PathText
    """Policy model path: a directory in Hugging Face format (config.json and safetensors). Nothing
    is downloaded."""

    tokenizer_path: PathText = ""
    """Tokenizer path: a directory with tokenizer.json and the chat template. Defaults to
    `model_path` when empty."""

    @property
    def resolved_tokenizer_path(self) -> str:
        return self.tokenizer_path or self.model_path
