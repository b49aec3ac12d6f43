"""Waiting for what comes sooner or later, also on a machine that has much else to do."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> float:
    """Returns after how many seconds a condition held; `what` says what it is."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"waited in vain until {what}"
        time.sleep(0.01)
    return time.monotonic() - start
