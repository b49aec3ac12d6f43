"""Prompts as users pass them -> tokens, or vectors in place of tokens."""

import dataclasses
import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_paged.arguments.suggestions import suggestions
from jax_paged.config.engine_args import EngineConfig
from jax_paged.core.request import PromptEmbeds, StandIn
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import ArgumentError, TooLongError, check, check_int
from jax_paged.inputs import as_list

if TYPE_CHECKING:
    from jax_paged.engine.features.multimodal.image_reader import ImageReader

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


class PromptReader:
    """Tokenizes prompts in any form, and checks them. May be called from any thread.

    Args:
        config: Limits of the model.
        tokenizer: None if prompts come as token ids only.
        images: Reads the images of prompts; None if the model reads text alone.
    """

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer | None, images: "ImageReader | None"
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._images = images

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
        if isinstance(prompt, dict) and "prompt_embeds" in prompt:
            return None, self._embedded(prompt)
        if self._images is not None and not (isinstance(prompt, dict) and "encoder_prompt" in prompt):
            return None, self._with_images(self._images, prompt, max_len)
        start = self._config.decoder_start_token_id
        names = {"encoder_prompt", "decoder_prompt"}
        if isinstance(prompt, dict) and prompt.keys() & names:
            if prompt.get("mm_processor_kwargs", 0) in (None, {}):  # vLLM's helpers add it
                prompt = {name: value for name, value in prompt.items() if name != "mm_processor_kwargs"}
            check(prompt.keys() == names, "prompt", prompt, f"a dict with the keys {sorted(names)} alone")
            if start is None:
                raise ArgumentError("prompt", prompt, "a prompt without encoder_prompt for this model")
            encoder = self._tokenize(prompt["encoder_prompt"], max_len)
            if prompt["decoder_prompt"] is None:
                return encoder, TokenizedPrompt(None, [start])
            decoder = self._tokenize(prompt["decoder_prompt"], max_len)
            if decoder.token_ids[0] != start:
                decoder.token_ids.insert(0, start)
            return encoder, decoder
        if start is None:
            return None, self._tokenize(prompt, max_len)
        return self._tokenize(prompt, max_len), TokenizedPrompt(None, [start])

    def _with_images(self, images: "ImageReader", prompt: Any, max_len: int | None) -> TokenizedPrompt:
        """Returns a prompt whose placeholders have become those of its images."""
        given = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
        if given:
            prompt = {name: value for name, value in prompt.items() if name != "multi_modal_data"}
        read = self._tokenize(prompt, max_len)
        token_ids, stand_ins = images.read(read.token_ids, given or {})
        return dataclasses.replace(read, token_ids=token_ids, stand_ins=stand_ins)

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

    def _embedded(self, prompt: dict[str, Any]) -> TokenizedPrompt:
        """Returns a prompt of vectors, checked; placeholders stand for its tokens."""
        size = self._config.embed_size
        check(
            prompt.keys() <= {"prompt_embeds", "cache_salt"},
            "prompt",
            prompt,
            'a dict with "prompt_embeds" and optionally "cache_salt"',
        )
        if not size:
            allowed = "unset because the engine was made without enable_prompt_embeds=True"
            raise ArgumentError("prompt_embeds", prompt["prompt_embeds"], allowed)
        given, salt = prompt["prompt_embeds"], prompt.get("cache_salt")
        check(salt is None or isinstance(salt, str), "cache_salt", salt, "a string")
        try:
            array = np.asarray(given)
            with np.errstate(over="ignore"):  # what is too large is found below
                rows = array.astype("<f4")
        except (TypeError, ValueError) as error:
            raise ArgumentError("prompt_embeds", given, f"an array of numbers ({error})") from error
        is_number = array.dtype.kind in "fiu" or array.dtype.name == "bfloat16"
        shape, allowed = array.shape, f"[tokens, {size}] with at least one token"
        check(is_number, "prompt_embeds", str(array.dtype), "a type of numbers", aspect="the dtype of")
        ok = len(shape) == 2 and shape[0] > 0 and shape[1] == size
        check(ok, "prompt_embeds", shape, allowed, aspect="the shape of")
        if not np.isfinite(rows).all():
            num_bad = int(rows.size - np.isfinite(rows).sum())
            raise ArgumentError("prompt_embeds", num_bad, "0", aspect="the number of non-finite values in")
        # Many rows are refused before they are copied.
        if len(rows) >= self._config.max_model_len:
            raise TooLongError(len(rows), self._config.max_model_len, num_reserved=1)
        embeds = PromptEmbeds(len(rows), np.ascontiguousarray(rows).tobytes())
        return TokenizedPrompt(None, [PLACEHOLDER] * len(rows), salt, embeds)

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
