"""Tokenizes the text of requests beside the event loop; long texts take turns in one lane."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

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
        lane: For long texts; short ones do not wait for them.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._forms = concurrent.futures.ThreadPoolExecutor(_NUM_FORM_THREADS, "forms")
        self._images = concurrent.futures.ThreadPoolExecutor(_NUM_IMAGE_THREADS, "images")
        self._fetches = concurrent.futures.ThreadPoolExecutor(_NUM_FETCHES, "fetches")

    async def fetch[T](self, function: Callable[[], T]) -> T:
        """Calls a function that waits for other hosts; nothing here waits with it."""
        return await asyncio.get_running_loop().run_in_executor(self._fetches, _called, function)

    async def read[T](
        self,
        texts: list[Any],
        function: Callable[[], T],
        *,
        with_form: bool = False,
        has_images: bool = False,
    ) -> T:
        """Calls a function, in a thread if it may take long.

        Args:
            texts: What will be tokenized; each a string, or lists and dicts of strings.
            function: Tokenizes them.
            with_form: Whether the function compiles the form of an output as well.
            has_images: Whether it decodes images as well.
        """
        sizes = [_num_characters(text) for text in texts]
        # Token ids have no characters, but a number.
        is_short = len(texts) == 1 and isinstance(texts[0], str | list)
        is_short = is_short and sizes[0] + len(texts[0]) <= _SHORT_TEXT
        if is_short and not with_form and not has_images:
            return _called(function)
        is_long = sum(sizes) > _LONG_TEXT
        async with self._lane.turn() if is_long else contextlib.nullcontext():
            threads = self._forms if with_form else self._images if has_images else None
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(threads, _called, function)


def _called[T](function: Callable[[], T]) -> T:
    try:
        return function()
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
