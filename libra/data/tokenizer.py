"""Text to token ids and back, with the files of a Hugging Face tokenizer directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from libra.data.chat_template import ChatTemplate, Message
from libra.errors import TokenizerError

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class PromptTokenizer:
    """The tokenizer of one run. It works on the CPU: long texts belong in a thread."""

    def __init__(self, directory: Path) -> None:
        """Raises TokenizerError when `directory` holds no usable tokenizer."""
        self._directory = directory
        self._tokenizer = _load_tokenizer(directory / "tokenizer.json")
        config = _read_json(directory / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        source = _template_source(directory, config)
        self._template = (
            None if source is None else ChatTemplate(source, special_tokens, origin=str(directory))
        )
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        self._id_of = {
            name: self._tokenizer.token_to_id(text) for name, text in special_tokens.items()
        }

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of.get("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of.get("eos_token")

    @property
    def vocab_size(self) -> int:
        """Ids in use, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_chat(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
    ) -> list[int]:
        """Ids of a conversation up to where the assistant's answer begins.

        The template writes the special tokens itself, so the tokenizer adds none.
        """
        text = self._chat_template().render(messages, tools=tools)
        return self._without_second_bos(self._encode(text, add_special_tokens=False))

    def encode_after_answer(
        self, messages: Sequence[Message], *, answer_token_ids: Sequence[int]
    ) -> list[int]:
        """Ids that follow a sampled answer when `messages` come after it, up to the next answer.

        An end-of-turn token that the policy sampled itself is not repeated.
        """
        text = self._chat_template().render_after_answer(messages)
        ids = self._encode(text, add_special_tokens=False)
        is_repeated = ids[:1] == list(answer_token_ids[-1:])
        return ids[1:] if is_repeated and ids[0] in self._special_ids else ids

    def encode_text(self, text: str) -> list[int]:
        """Ids of a prompt that is not a conversation, begun as the tokenizer begins a text."""
        return self._without_second_bos(self._encode(text, add_special_tokens=True))

    def encode_fragment(self, text: str) -> list[int]:
        """Ids of text in the middle of a sequence: no special token is added."""
        return self._encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def spelled(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Each token's own text, special tokens included."""
        return tuple(
            self._tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids
        )

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise TokenizerError(
                f"{self._directory}: the tokenizer has no chat template; set "
                "apply_chat_template: false, or add chat_template.jinja"
            )
        return self._template

    def _without_second_bos(self, ids: list[int]) -> list[int]:
        # A text that begins with the token's own spelling, and a tokenizer that adds another.
        bos = self.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise TokenizerError(f"{path}: no such file; tokenizer_path must name a directory with it")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception, whatever is wrong
        raise TokenizerError(f"{path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise TokenizerError(f"{path}: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens; older files write a token as an object with `content`."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        match config.get(name):
            case str(text) | {"content": str(text)}:
                found[name] = text
            case _:
                pass
    return found


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    match config.get("chat_template"):
        case str(source):
            return source
        case list(named):
            by_name = {entry["name"]: entry["template"] for entry in named}
            default = by_name.get("default")
            return default if isinstance(default, str) else None
        case _:
            return None
