"""Prompts as users pass them -> tokens, or vectors in place of tokens."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_paged.arguments.plain_values import as_list
from jax_paged.arguments.suggestions import suggestions
from jax_paged.config.engine_args import EngineConfig
from jax_paged.core.request import PromptEmbeds, StandIn
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import ArgumentError, check, check_int
from jax_paged.inputs import Prompt

# Stands in prompts for tokens that are vectors.
PLACEHOLDER = 0


@dataclasses.dataclass
class TokenizedPrompt:
    """A prompt's text, its token ids, the cache_salt that comes with it, vectors and images in it."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None
    embeds: PromptEmbeds | None = None
    stand_ins: tuple[StandIn, ...] = ()

    @property
    def is_plain(self) -> bool:
        """True if all tokens are text."""
        return not (self.embeds or self.stand_ins)


# Reads a prompt with a feature: takes the prompt, and the function that tokenizes the text in it. Returns the
# encoder's prompt, None without one, and the decoder's prompt.
ReadSpecial = Callable[
    [Any, Callable[[Any], TokenizedPrompt]], tuple[TokenizedPrompt | None, TokenizedPrompt]
]
# Keys of a prompt that only read_special reads, whatever the model.
SPECIAL_KEYS = frozenset({"prompt_embeds", "encoder_prompt", "decoder_prompt"})


class PromptReader:
    """Tokenizes prompts in any form, and checks them. May be called from any thread.

    Args:
        config: Limits of the model.
        tokenizer: None if prompts come as token ids only.
        read_special: Reads prompts with features.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, read_special: ReadSpecial) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._read_special = read_special
        self._is_text_decoder = config.images is None and config.decoder_start_token_id is None

    def read(
        self, prompt: Any, *, is_truncated: bool = False
    ) -> tuple[TokenizedPrompt | None, TokenizedPrompt]:
        """Returns what an encoder reads, None without one, and the decoder's prompt.

        Args:
            prompt: In any form.
            is_truncated: Whether a prompt that is too long will be cut. If not, text that certainly has more
                than max_model_len tokens is refused without being tokenized.

        Raises:
            ValueError: If it is no prompt, or does not fit the model.
        """
        max_len = None if is_truncated else self._config.max_model_len
        is_special = isinstance(prompt, dict) and not SPECIAL_KEYS.isdisjoint(prompt)
        if self._is_text_decoder and not is_special:
            return None, self._tokenize(prompt, max_len)
        return self._read_special(prompt, lambda part: self._tokenize(part, max_len))

    def _tokenize(self, prompt: Any, max_len: int | None) -> TokenizedPrompt:
        """Returns the text, the checked token ids and the salt of a prompt in any form."""
        if not isinstance(prompt, dict):
            if isinstance(prompt, str):
                return TokenizedPrompt(prompt, self._encode(prompt, max_len))
            return TokenizedPrompt(None, self._checked_ids("prompt", prompt))
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        names = {"prompt", "prompt_token_ids", "cache_salt"}
        others = "multi_modal_data", "mm_processor_kwargs"  # in vLLM's prompts; here a text model takes none
        empty = {name for name in others if prompt.get(name) in (None, {})}
        ok = prompt.keys() <= names | empty and (text is not None or token_ids is not None)
        allowed = 'a dict with "prompt", "prompt_token_ids" or both, and optionally "cache_salt"'
        close = suggestions(prompt, (*names, *others))
        check(ok, "prompt", prompt, allowed, remedy=close)
        check(text is None or isinstance(text, str), "prompt", text, "a string")
        salt = prompt.get("cache_salt")
        check(salt is None or isinstance(salt, str), "cache_salt", salt, "a string")
        if token_ids is not None:
            return TokenizedPrompt(text, self._checked_ids("prompt_token_ids", token_ids), salt)
        assert isinstance(text, str), "checked above"
        return TokenizedPrompt(text, self._encode(text, max_len), salt)

    def _encode(self, text: str, max_len: int | None) -> list[int]:
        if self._tokenizer is None:
            raise ArgumentError("prompt", text, "token ids because the engine has no tokenizer")
        check(bool(text), "prompt", text, "a non-empty string")
        token_ids = self._tokenizer.encode(text, max_model_len=max_len)
        check(bool(token_ids), "prompt", text, "text of at least one token")
        highest, allowed = max(token_ids), self._config.vocab_size - 1
        if highest > allowed:
            remedy = f". The tokenizer {self._tokenizer.name!r} does not fit the model"
            allowed = f"in the model's vocabulary, [0, {allowed}]"
            raise ArgumentError("prompt", highest, allowed, aspect="each token id of", remedy=remedy)
        return token_ids

    def _checked_ids(self, name: str, value: Any) -> list[int]:
        token_ids = as_list(value)
        allowed = (
            "a list of token ids"
            if name == "prompt_token_ids"
            else "a string, a list of token ids, or a dict with one of these"
        )
        check(isinstance(token_ids, list | tuple), name, value, allowed)
        check(bool(token_ids), "prompt_token_ids", token_ids, "at least one token id")
        vocab_size, checked = self._config.vocab_size, []
        for i, token_id in enumerate(token_ids):
            # A long prompt has a hundred thousand of them: a call per token id would be slow.
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                if isinstance(token_id, numbers.Integral) and not isinstance(token_id, bool):
                    token_id = int(token_id)  # NumPy's
                check_int(f"prompt_token_ids[{i}]", token_id, 0, vocab_size - 1)
            checked.append(token_id)
        return checked


def as_prompts(prompts: Any) -> list[Prompt]:
    """Returns a list of prompts from what users pass: one prompt in any form, or a list of them.

    A list of integers is one prompt, and so is a NumPy array of one dimension.
    """
    prompts = as_list(prompts)
    if isinstance(prompts, list | tuple) and not (prompts and isinstance(prompts[0], numbers.Integral)):
        return list(prompts)
    is_one = isinstance(prompts, str | dict | list | tuple)
    check(is_one, "prompts", prompts, "a prompt or a list of prompts")
    one: Any = prompts
    return [one]


def with_soft_prompt(prompt: TokenizedPrompt, rows: np.ndarray) -> TokenizedPrompt:
    """Returns a prompt behind the vectors of a soft prompt."""
    embeds = PromptEmbeds(len(rows), np.ascontiguousarray(rows.astype("<f4")).tobytes())
    token_ids = [PLACEHOLDER] * len(rows) + prompt.token_ids
    return TokenizedPrompt(prompt.text, token_ids, prompt.cache_salt, embeds)


def one_salt(argument: str, encoder: TokenizedPrompt | None, decoder: TokenizedPrompt) -> str:
    """Returns the salt of a request, which may come as an argument and with its prompts."""
    given = [argument or None, encoder and encoder.cache_salt, decoder.cache_salt]
    salts = {salt for salt in given if salt is not None}
    check(len(salts) <= 1, "cache_salt", sorted(salts), "the same for all parts of a request")
    salt = salts.pop() if salts else ""
    # What stands for adapters, hooks and vectors follows such a character.
    check("\0" not in salt, "cache_salt", salt, r"a string without the character \0")
    return salt
