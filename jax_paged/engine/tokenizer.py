"""Text to token ids and back, and the chat template."""

import copy
import functools
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import tokenizers

from jax_paged.checks import check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, Any]]

# Classes of transformers that are tokenizer.json and nothing else.
_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


class Tokenizer:
    """A model's tokenizer; thread-safe.

    Args:
        name: Folder in Hugging Face layout, or hub id.

    Raises:
        ValueError: If there is no tokenizer that can be read.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # tokenizer_config.json, if that and tokenizer.json are all there is; None if transformers is needed.
        self._settings: dict[str, Any] | None = None
        self._backend = self._load_backend()
        self._backend.no_padding()
        self._backend.no_truncation()
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)

    @functools.cached_property
    def hf(self) -> "PreTrainedTokenizerBase":
        """The tokenizer as transformers loads it; the first use imports transformers (about a second)."""
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install torch
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")  # in notebooks without ipywidgets
            from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.name, trust_remote_code=False)
        except Exception as error:
            raise ValueError(f"tokenizer {self.name!r} can't be loaded: {error}") from error

    @functools.cached_property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, as transformers reads it; None if the tokenizer names none."""
        if self._settings is None:
            return cast("int | None", self.hf.eos_token_id)
        token = self._settings.get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        return None if content is None else self._backend.token_to_id(content)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, with the special tokens that the tokenizer itself adds.

        Raises:
            ValueError: If `text` is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt is not valid Unicode: {error}") from error
        return self._backend.encode(text).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`; ids that the tokenizer does not know are nothing."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def adds_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether `decode` heeds a token: it knows it, and does not skip it."""
        skipped = skip_special_tokens and token_id in self._special_ids
        return not skipped and self._backend.id_to_token(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """Returns what a token adds to a text, leading space included; U+FFFD for part of a character."""
        text = self._token_texts.get(token_id)
        if text is None:
            anchor, start = self._anchor
            text = self.decode([*anchor, token_id], skip_special_tokens=False)[start:]
            self._token_texts[token_id] = text
        return text

    def encode_chat(self, messages: Messages) -> list[int]:
        """Returns the ids of a conversation up to where the assistant's answer starts.

        Args:
            messages: dicts with "role", and with "content": a string, or a list of
                {"type": "text", "text": ...}.

        Raises:
            ValueError: If the tokenizer has no chat template, or if it does not take the messages.
        """
        plain = [_plain_message(i, message) for i, message in enumerate(messages)]
        check(bool(plain), "messages", plain, "at least one message")
        if not self.hf.chat_template:
            raise ValueError(f"tokenizer {self.name!r} has no chat template: use completions instead")
        try:
            ids = self.hf.apply_chat_template(
                plain, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template does not take these messages: {error}") from error
        return cast(list[int], ids)

    def _load_backend(self) -> tokenizers.Tokenizer:
        """Reads tokenizer.json alone where that is all there is: a hundredth of the time."""
        config, file = Path(self.name) / "tokenizer_config.json", Path(self.name) / "tokenizer.json"
        if config.is_file() and file.is_file():
            settings = json.loads(config.read_text(encoding="utf-8"))
            adds = any(key.startswith("add_") and value for key, value in settings.items())
            if settings.get("tokenizer_class") in _PLAIN_CLASSES and not adds:
                self._settings = settings
                return tokenizers.Tokenizer.from_file(str(file))
        backend = getattr(self.hf, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"tokenizer {self.name!r} has no form that the tokenizers library can run")
        return copy.deepcopy(backend)  # transformers changes its own from call to call

    @functools.cached_property
    def _token_texts(self) -> dict[int, str]:
        return {}

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], int]:
        """A token to stand before another one (some decoders strip the first space), and its length."""
        for piece in ("a", "▁a"):
            token_id = self._backend.token_to_id(piece)
            if token_id is not None:
                return [token_id], len(self.decode([token_id]))
        return [], 0


def _plain_message(index: int, message: Any) -> dict[str, Any]:
    name = f"messages[{index}]"
    check(
        isinstance(message, dict) and isinstance(message.get("role"), str),
        name,
        message,
        "a dict with a role",
    )
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            ok = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            check(ok, f"{name}.content", part, '{"type": "text", "text": ...}')
        content = "".join(part["text"] for part in content)
    check(isinstance(content, str), f"{name}.content", content, "a string or a list of text parts")
    return {**message, "content": content}
