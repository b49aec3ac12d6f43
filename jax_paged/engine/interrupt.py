"""Ctrl-C that waits: it must not stop the engine between two states."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Holds back Ctrl-C until the block ends, so that it can't stop the engine between two states.

    Does nothing outside of the main thread, which alone gets signals, or where Ctrl-C has no Python handler.

    Yields:
        An event that is set once Ctrl-C was pressed.
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
