"""Delay of Ctrl-C (SIGINT) until the engine is in a consistent state."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Delays Ctrl-C until the end of the block, so that it can't leave the engine in an inconsistent state.

    Does nothing outside the main thread, which is the only one that receives signals, and if SIGINT has no
    Python handler.

    Yields:
        An event that is set when Ctrl-C is pressed.
    """
    pressed = threading.Event()
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield pressed
        return
    frames: list[FrameType | None] = []

    def note(_: int, frame: FrameType | None) -> None:
        frames.append(frame)
        pressed.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
        if pressed.is_set():
            previous(signal.SIGINT, frames[0])
