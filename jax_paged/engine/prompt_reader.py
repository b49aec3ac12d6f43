"""Tokenization and validation of prompts in every form that users may pass."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_paged.arguments.plain_values import as_list
from jax_paged.arguments.suggestions import suggestions
from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.request import PlaceholderData, PromptEmbeds
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import ArgumentError, check, check_int
from jax_paged.inputs import Prompt

# Token id at the positions of a prompt that have vectors instead of tokens.
PLACEHOLDER = 0


@dataclasses.dataclass
class TokenizedPrompt:
    """A prompt after tokenization.

    Args:
        text: Text of the prompt; None if the prompt was passed as token ids.
        token_ids: Token ids. Positions that have vectors instead of tokens contain PLACEHOLDER.
        cache_salt: The cache salt that was passed with the prompt; None if there was none.
        embeds: Vectors in place of the first tokens; None without vectors.
        placeholder_data: Data in place of other tokens, such as images.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None
    embeds: PromptEmbeds | None = None
    placeholder_data: tuple[PlaceholderData, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the prompt consists of tokens only, without vectors and images."""
        return not (self.embeds or self.placeholder_data)


# Reads a prompt that uses a feature. The arguments are the prompt and the function that tokenizes text
# prompts. Returns the encoder prompt (None without an encoder) and the decoder prompt.
ReadPrompt = Callable[[Any, Callable[[Any], TokenizedPrompt]], tuple[TokenizedPrompt | None, TokenizedPrompt]]
# A prompt with one of these keys is always read by `read_feature`, whatever the model is.
FEATURE_KEYS = frozenset({"prompt_embeds", "encoder_prompt", "decoder_prompt"})


class PromptReader:
    """Reader of prompts, which tokenizes and checks them. Methods may be called from any thread.

    Args:
        config: Settings of the engine, with the limits of the model.
        tokenizer: The tokenizer; None if all prompts are token ids.
        read_feature: Reads prompts that use a feature, and all prompts of encoder-decoder and multimodal
            models.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, read_feature: ReadPrompt) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._read_feature_prompt = read_feature
        self._is_text_decoder = config.images is None and config.decoder_start_token_id is None

    def read(
        self, prompt: Any, *, is_truncated: bool = False
    ) -> tuple[TokenizedPrompt | None, TokenizedPrompt]:
        """Returns the encoder prompt (None without an encoder) and the decoder prompt.

        Args:
            prompt: The prompt, in any of its forms.
            is_truncated: Whether a prompt that is too long will be truncated. If not, text that certainly has
                more than max_model_len tokens is rejected without being tokenized.

        Raises:
            ValueError: If the form of the prompt is not valid, or the prompt does not fit the model.
        """
        max_len = None if is_truncated else self._config.max_model_len
        uses_feature = isinstance(prompt, dict) and not FEATURE_KEYS.isdisjoint(prompt)
        if self._is_text_decoder and not uses_feature:
            return None, self._tokenize(prompt, max_len)
        return self._read_feature_prompt(prompt, lambda part: self._tokenize(part, max_len))

    def _tokenize(self, prompt: Any, max_len: int | None) -> TokenizedPrompt:
        """Returns the text, the checked token ids and the cache salt of a text prompt in any form."""
        if not isinstance(prompt, dict):
            if isinstance(prompt, str):
                return TokenizedPrompt(prompt, self._encode(prompt, max_len))
            return TokenizedPrompt(None, self._checked_ids("prompt", prompt))
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        names = {"prompt", "prompt_token_ids", "cache_salt"}
        # Keys of vLLM's prompts. A text model accepts them only if they have no value.
        others = "multi_modal_data", "mm_processor_kwargs"
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
        assert isinstance(text, str), "the prompt has neither text nor token ids"
        return TokenizedPrompt(text, self._encode(text, max_len), salt)

    def _encode(self, text: str, max_len: int | None) -> list[int]:
        if self._tokenizer is None:
            raise ArgumentError("prompt", text, "token ids because the engine has no tokenizer")
        check(bool(text), "prompt", text, "a non-empty string")
        token_ids = self._tokenizer.encode(text, max_model_len=max_len)
        check(bool(token_ids), "prompt", text, "text of at least one token")
        highest, allowed = max(token_ids), self._config.vocab_size - 1
        if highest > allowed:
            remedy = f". The tokenizer {self._tokenizer.name!r} does not match the model"
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
            # Token ids are checked inline, because a function call for each of them would be slow in a long
            # prompt.
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                if isinstance(token_id, numbers.Integral) and not isinstance(token_id, bool):
                    token_id = int(token_id)  # a NumPy integer
                check_int(f"prompt_token_ids[{i}]", token_id, 0, vocab_size - 1)
            checked.append(token_id)
        return checked


def as_prompts(prompts: Any) -> list[Prompt]:
    """Returns a list of prompts. The argument is a list of prompts or one prompt in any form.

    A list of integers is one prompt of token ids, and so is a one-dimensional NumPy array.
    """
    prompts = as_list(prompts)
    if isinstance(prompts, list | tuple) and not (prompts and isinstance(prompts[0], numbers.Integral)):
        return list(prompts)
    is_one = isinstance(prompts, str | dict | list | tuple)
    check(is_one, "prompts", prompts, "a prompt or a list of prompts")
    one: Any = prompts
    return [one]


def with_soft_prompt(prompt: TokenizedPrompt, rows: np.ndarray) -> TokenizedPrompt:
    """Returns a prompt with the vectors of a soft prompt in front of its tokens.

    Args:
        prompt: The prompt.
        rows: The vectors, [soft prompt tokens, hidden_size].
    """
    embeds = PromptEmbeds(len(rows), np.ascontiguousarray(rows.astype("<f4")).tobytes())
    token_ids = [PLACEHOLDER] * len(rows) + prompt.token_ids
    return TokenizedPrompt(prompt.text, token_ids, prompt.cache_salt, embeds)


def cache_salt_of(argument: str, encoder: TokenizedPrompt | None, decoder: TokenizedPrompt) -> str:
    """Returns the cache salt of a request, which the argument or its prompts may specify; "" if none does.

    Args:
        argument: The cache_salt argument; "" if it was not passed.
        encoder: The encoder prompt; None without an encoder.
        decoder: The decoder prompt.

    Raises:
        ValueError: If several different salts are specified, or the salt contains a null character.
    """
    given = [argument or None, encoder and encoder.cache_salt, decoder.cache_salt]
    salts = {salt for salt in given if salt is not None}
    check(len(salts) <= 1, "cache_salt", sorted(salts), "the same in the argument and in all prompts")
    salt = salts.pop() if salts else ""
    # The engine uses this character to append adapters, hooks and vectors to the salt (see new_request.py).
    check("\0" not in salt, "cache_salt", salt, r"a string without null characters (\0)")
    return salt
