"""Synchronized: a base class whose public methods run one at a time, whichever threads call them."""

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Self

# Interval (seconds) at which a thread that waits for a lock checks whether to give up.
_POLL_INTERVAL_S = 0.1
_UNSYNCHRONIZED = "is_unsynchronized"


def unsynchronized[F: Callable[..., Any]](method: F) -> F:
    """Marks a public method as safe during calls of other threads, so that it does not wait for them."""
    setattr(method, _UNSYNCHRONIZED, True)
    return method


class CallLock:
    """A re-entrant lock that waiting threads get in turn.

    threading.RLock is not fair: a thread that releases it and takes it again, as a loop of steps does, may
    overtake threads that wait. Here the first waiting thread holds a second lock, `_turn`, until it gets the
    main lock, and all other threads wait for `_turn`. `call` takes both locks in `with` statements, so that
    Ctrl-C can't leave them locked.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()  # held by the first waiting thread
        self._lock = threading.RLock()

    @property
    def is_held(self) -> bool:
        """Whether the current thread holds the lock."""
        # threading.Condition in the standard library uses this private method in the same way.
        return self._lock._is_owned()  # pyright: ignore[reportAttributeAccessIssue]

    def call[T](self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Calls a function while this thread holds the lock. Ctrl-C can interrupt the wait for the lock."""
        if self.is_held:
            return function(*args, **kwargs)
        with self._turn, self._lock:
            # A thread that has just released the lock waits here for `_turn` if another thread waits for the
            # lock. Both locks are released and the lock is taken again, because `with` can't release only
            # `_turn`. In this short time, another thread may still overtake this one.
            pass
        with self._lock:
            return function(*args, **kwargs)

    @contextlib.contextmanager
    def held(self, gives_up: Callable[[], bool]) -> Iterator[bool]:
        """Holds the lock in a block.

        Unlike `call`, it may be used if the caller has deferred Ctrl-C, which then can't interrupt the wait:
        `gives_up` ends it instead.

        Args:
            gives_up: Called repeatedly while waiting. If it returns True, the block runs without the lock.

        Yields:
            Whether the lock is held.
        """
        if self.is_held:
            yield True
            return
        if not _acquired(self._turn, gives_up):
            yield False
            return
        try:
            is_held = _acquired(self._lock, gives_up)
        finally:
            self._turn.release()
        try:
            yield is_held
        finally:
            if is_held:
                self._lock.release()


class Synchronized:
    """Base class of objects whose public methods run one at a time. Each object has its own lock.

    The public methods of a subclass are wrapped when the subclass is defined. Class methods, properties
    (which read a single value), names with a leading underscore and methods marked with `unsynchronized` are
    not wrapped. A method may call other methods of the same object.
    """

    _calls: CallLock

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Makes an object with its own lock."""
        self = super().__new__(cls)
        self._calls = CallLock()
        return self

    def exclusive(self, gives_up: Callable[[], bool]) -> contextlib.AbstractContextManager[bool]:
        """Returns a context in which no other thread can run a method, for calls that belong together.

        Args:
            gives_up: Called repeatedly while waiting for other threads. If it returns True, the wait ends.

        Returns:
            The context manager; its value is False if the wait ended without the lock.
        """
        return self._calls.held(gives_up)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, method in list(vars(cls).items()):
            is_method = isinstance(method, types.FunctionType) and not name.startswith("_")
            is_marked = any(hasattr(vars(base).get(name), _UNSYNCHRONIZED) for base in cls.__mro__)
            if is_method and not is_marked:
                setattr(cls, name, _synchronized(method))


def _synchronized(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Synchronized, /, *args: Any, **kwargs: Any) -> Any:
        return self._calls.call(method, self, *args, **kwargs)

    return call


def _acquired(lock: "threading.Lock | threading.RLock", gives_up: Callable[[], bool]) -> bool:
    """Waits for a lock. Returns True if it has been acquired, False if the caller gives up."""
    while not lock.acquire(timeout=_POLL_INTERVAL_S):
        if gives_up():
            return False
    return True
