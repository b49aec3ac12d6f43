"""Tokenizes what clients send: beside the event loop, long texts one at a time, endless ones not at all."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax_paged.engine.tokenizer import Tokenizer
from jax_paged.server.responses import ApiError

# Characters that take about as long as a step of a small model (10 ms).
_LONG_TEXT = 16_384


class TextReader:
    """Calls functions that tokenize, in threads.

    The tokenizer leaves the interpreter to others while it works, but not the cores: so all long texts
    together have a single thread, and short ones never wait for them.

    Args:
        tokenizer: Tells how many characters a token has at most; None if there are no texts to read.
        max_model_len: Tokens that a text may have.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._max_characters = tokenizer.max_characters(max_model_len) if tokenizer else None
        self._long_texts = ThreadPoolExecutor(1, "long-texts")

    async def read[T](self, name: str, texts: list[Any], function: Callable[..., T], *args: Any) -> T:
        """Calls a function in a thread, unless a text is longer than any text of max_model_len tokens.

        Args:
            name: The field of the request that the texts are in.
            texts: What will be tokenized; each a string, or lists and dicts of strings.
            function: Tokenizes them.
            args: Of the function.

        Raises:
            ApiError: If a text is too long.
        """
        sizes = [_num_characters(text) for text in texts]
        longest = max(sizes, default=0)
        if self._max_characters is not None and longest > self._max_characters:
            raise ApiError(
                f"{name} has {longest} characters, which are more tokens than max_model_len, "
                f"{self._max_model_len}; allowed: at most {self._max_characters} characters",
                param=name,
                code="context_length_exceeded",
            )
        threads = self._long_texts if sum(sizes) > _LONG_TEXT else None
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: function(*args))


def _num_characters(value: Any) -> int:
    """Returns the number of characters in all strings of a JSON value."""
    num, rest = 0, [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            num += len(item)
        elif isinstance(item, dict):
            rest.extend(item.values())
        elif isinstance(item, list) and not (item and isinstance(item[0], int)):  # token ids are many
            rest.extend(item)
    return num
