"""What clients send is read so that nobody else is held up: a lane for what is long, and a limit to it."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from jax_paged.engine.tokenizer import Tokenizer
from jax_paged.server.responses import too_long

# Characters that are tokenized in about 10 ms, and so few that no thread is woken for them.
_LONG_TEXT = 16_384
_SHORT_TEXT = 1024
# Bytes that are parsed in a few ms; seconds of the lane per byte, twice as long as 2 MB took on a busy core.
LONG_BODY = 256 * 1024
_SECONDS_PER_BYTE = 3e-8
# That wait for forms to compile. The other threads are for texts: a slow form holds none of them up.
_NUM_FORM_THREADS = 4
# That decode images, each of which may take a hundred megabytes meanwhile.
_NUM_IMAGE_THREADS = 2
# That wait for other hosts, which may be slow: they hold neither a lane nor a thread that decodes.
_NUM_FETCHES = 8
# How long the lane rests after a text, in times of what the text took.
_REST = 3


class Lane:
    """Lets long work through one by one, with rests: it has one core at most, and not all the time.

    Tokenizing and parsing take turns with the engine for the interpreter and for the cores, and a step waits
    for the slowest of its threads. Nobody is slower for the rests: the engine takes longer for a long
    prompt than the lane does.
    """

    def __init__(self) -> None:
        self._is_taken = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a turn, which ends with the context."""
        await self._is_taken.acquire()
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            yield
        finally:
            loop.call_later(_REST * (loop.time() - start), self._is_taken.release)

    async def body_turn(self, num_bytes: int) -> None:
        """Waits until a long body that has been received may be parsed.

        Args:
            num_bytes: Length of the body.
        """
        await self._is_taken.acquire()
        asyncio.get_running_loop().call_later(num_bytes * _SECONDS_PER_BYTE, self._is_taken.release)


class TextReader:
    """Tokenizes in threads, so that the event loop goes on, unless it takes no time.

    Args:
        tokenizer: Tells how many characters a token has at most; None if there are no texts to read.
        max_model_len: Tokens that a text may have.
        lane: For long texts; short ones do not wait for them.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int, lane: Lane) -> None:
        self._max_model_len = max_model_len
        self._max_characters = tokenizer.max_characters(max_model_len) if tokenizer else None
        self._lane = lane
        self._forms = concurrent.futures.ThreadPoolExecutor(_NUM_FORM_THREADS, "forms")
        self._images = concurrent.futures.ThreadPoolExecutor(_NUM_IMAGE_THREADS, "images")
        self._fetches = concurrent.futures.ThreadPoolExecutor(_NUM_FETCHES, "fetches")

    async def fetch[T](self, function: Callable[[], T]) -> T:
        """Calls a function that waits for other hosts; nothing here waits with it."""
        return await asyncio.get_running_loop().run_in_executor(self._fetches, _called, function)

    async def read[T](
        self,
        name: str,
        texts: list[Any],
        function: Callable[..., T],
        *args: Any,
        with_form: bool = False,
        has_images: bool = False,
    ) -> T:
        """Calls a function, in a thread if it may take long, unless a text is more than max_model_len tokens.

        Args:
            name: The field of the request that the texts are in.
            texts: What will be tokenized; each a string, or lists and dicts of strings.
            function: Tokenizes them.
            args: Of the function.
            with_form: Whether the function compiles the form of an output as well.
            has_images: Whether it decodes images as well.

        Raises:
            ApiError: If a text is too long.
        """
        sizes = [_num_characters(text) for text in texts]
        longest = max(sizes, default=0)
        if self._max_characters is not None and longest > self._max_characters:
            raise too_long(
                f"{name} has {longest} characters, which are more tokens; allowed: at most "
                f"{self._max_characters} characters",
                self._max_model_len,
                name,
            )
        # Token ids have no characters, but a number.
        is_short = len(texts) == 1 and isinstance(texts[0], str | list)
        is_short = is_short and longest + len(texts[0]) <= _SHORT_TEXT
        if is_short and not with_form and not has_images:
            return _called(function, *args)
        is_long = sum(sizes) > _LONG_TEXT
        async with self._lane.turn() if is_long else contextlib.nullcontext():
            threads = self._forms if with_form else self._images if has_images else None
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads, _called, function, *args)


def _called[T](function: Callable[..., T], *args: Any) -> T:
    try:
        return function(*args)
    except StopIteration as error:  # a future can't hold it: whoever awaits it would wait forever
        raise RuntimeError("an iterator has ended too early") from error


def _num_characters(value: Any) -> int:
    """Returns the number of characters in all strings of a JSON value."""
    num, rest = 0, [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            num += len(item)
        elif isinstance(item, dict):
            rest += [*item, *item.values()]
        elif isinstance(item, list) and set(map(type, item)) != {int}:  # token ids are many
            rest.extend(item)
    return num
