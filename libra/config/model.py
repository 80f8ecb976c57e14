"""What is trained: the policy model and its tokenizer."""

from libra.config.base import Config


class ModelConfig(Config, frozen=True, kw_only=True):
    """Flat keys of the policy model."""

    model_path: str
    """Directory with the policy model in Hugging Face format (config.json and safetensors)."""

    tokenizer_path: str = ""
    """Directory with tokenizer.json and the chat template; empty means `model_path`."""

    @property
    def resolved_tokenizer_path(self) -> str:
        return self.tokenizer_path or self.model_path
