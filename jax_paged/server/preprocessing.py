"""Preprocessing of requests in threads, so that it does not block the event loop or slow the engine down.

Preprocessing is mainly tokenization, but also the compilation of grammars and the download and decoding of
images.
"""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

# Texts with more characters than this, which take about 10 ms to tokenize, wait for the ThrottledLock. Texts
# with at most _SHORT_TEXT characters are tokenized in the event loop, because waking a thread would take
# longer.
_LONG_TEXT = 16_384
_SHORT_TEXT = 1024
# Bodies with more bytes than this, which take a few ms to parse, wait for the ThrottledLock. It is then held
# for _SECONDS_PER_BYTE times the number of bytes: twice the parsing time that was measured with a body of
# 2 MB on a busy core.
LONG_BODY = 256 * 1024
_SECONDS_PER_BYTE = 3e-8
# Threads that compile grammars. A slow grammar does not delay texts, which have other threads.
_NUM_GRAMMAR_THREADS = 4
# Threads that decode images. Each may need a hundred megabytes of memory while decoding.
_NUM_IMAGE_THREADS = 2
# Threads that download images from other hosts, which may be slow. A download occupies neither the
# ThrottledLock nor a thread that decodes images.
_NUM_FETCH_THREADS = 8
# Duration of the rest after a turn of the ThrottledLock, as a multiple of the duration of the turn.
_REST_FACTOR = 3


class ThrottledLock:
    """Lock for long CPU work such as tokenizing or parsing. It stays locked for a rest after each turn.

    Such work competes with the engine for the interpreter and the CPU cores, and a step of the engine waits
    for its slowest thread. With the lock, long work uses at most one core, and only a part of the time. The
    rests do not slow the server down, because the engine needs more time for a long prompt than the
    tokenizer.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a turn, which ends with the context."""
        await self._lock.acquire()
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            yield
        finally:
            loop.call_later(_REST_FACTOR * (loop.time() - start), self._lock.release)

    async def body_turn(self, num_bytes: int) -> None:
        """Waits for a turn to parse a long body. The turn ends by itself after the estimated parsing time.

        Args:
            num_bytes: Length of the body (bytes).
        """
        await self._lock.acquire()
        asyncio.get_running_loop().call_later(num_bytes * _SECONDS_PER_BYTE, self._lock.release)


class Preprocessor:
    """Runner for the preprocessing of requests: in threads, or in the event loop if the text is short.

    Args:
        cpu_lock: Lock that long texts must acquire. Shorter texts do not wait for it.
    """

    def __init__(self, cpu_lock: ThrottledLock) -> None:
        self._cpu_lock = cpu_lock
        self._grammar_threads = concurrent.futures.ThreadPoolExecutor(_NUM_GRAMMAR_THREADS, "grammars")
        self._image_threads = concurrent.futures.ThreadPoolExecutor(_NUM_IMAGE_THREADS, "images")
        self._fetch_threads = concurrent.futures.ThreadPoolExecutor(_NUM_FETCH_THREADS, "fetches")

    async def fetch[T](self, function: Callable[[], T]) -> T:
        """Runs a function that waits for other hosts in a thread of its own pool, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._fetch_threads, _called, function)

    async def run[T](
        self,
        texts: list[Any],
        function: Callable[[], T],
        *,
        with_grammar: bool = False,
        has_images: bool = False,
    ) -> T:
        """Runs a function that tokenizes texts, in a thread if it may take long, and returns its result.

        Args:
            texts: The texts to tokenize. Each is a string, or nested lists and dicts of strings.
            function: Tokenizes the texts.
            with_grammar: Whether the function also compiles a grammar.
            has_images: Whether the function also decodes images.
        """
        sizes = [_num_characters(text) for text in texts]
        # A list of token ids has no characters, so its length counts as well.
        is_short = len(texts) == 1 and isinstance(texts[0], str | list)
        num_items = sum(len(text) for text in texts if isinstance(text, list))
        is_short = is_short and sizes[0] + num_items <= _SHORT_TEXT
        if is_short and not with_grammar and not has_images:
            return _called(function)
        is_long = sum(sizes) > _LONG_TEXT
        async with self._cpu_lock.turn() if is_long else contextlib.nullcontext():
            threads = self._grammar_threads if with_grammar else self._image_threads if has_images else None
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads, _called, function)


def _called[T](function: Callable[[], T]) -> T:
    try:
        return function()
    except StopIteration as error:  # A future cannot hold a StopIteration, so awaiting it would never end.
        raise RuntimeError("StopIteration was raised while a request was processed") from error


def _num_characters(value: Any) -> int:
    """Returns the number of characters in all strings of a JSON value."""
    num, rest = 0, [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            num += len(item)
        elif isinstance(item, dict):
            rest += [*item, *item.values()]
        # skips lists of token ids, which may be long
        elif isinstance(item, list) and set(map(type, item)) != {int}:
            rest.extend(item)
    return num
