"""A plugin of pytest: tests start with Python's own handlers of signals, however the run was started.

Shells start background jobs with SIGINT ignored, and so do some CI systems. Python then installs no
handler for Ctrl-C, and neither do the processes that tests start.
"""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def default_signal_handlers() -> Iterator[None]:
    """Sets the handlers with which Python starts in a terminal."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in previous.items():
        if handler is not None:  # None: a handler that Python did not install, and cannot restore
            signal.signal(number, handler)
