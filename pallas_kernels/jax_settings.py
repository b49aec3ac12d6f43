"""JAX settings under which this package computes: JAX's defaults, whatever the user's program has set.

A user's program may enable 64-bit types, for example. They would change the types of intermediate results,
and so the results, the memory that they take, and the operands of native code. The functions here apply the
default settings to a scope of one thread, and leave the rest of the process alone.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

_SETTINGS: dict[str, Any] = {
    "enable_x64": False,
    "numpy_dtype_promotion": "standard",
    "numpy_rank_promotion": "allow",
    "threefry_partitionable": True,  # decides which random bits a key has
}


@contextlib.contextmanager
def default_settings() -> Iterator[None]:
    """Applies the settings in this thread until the `with` block ends."""
    import jax  # not above: the engine can be imported without JAX

    with contextlib.ExitStack() as stack:
        for name, value in _SETTINGS.items():
            stack.enter_context(getattr(jax, name)(value))
        yield


def apply_to_process() -> None:
    """Applies the settings to all threads of a process that computes nothing else."""
    import jax

    for name, value in _SETTINGS.items():
        jax.config.update(f"jax_{name}", value)


def with_default_settings[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function run, or be traced, with the settings."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with default_settings():
            return function(*args, **kwargs)

    return call


def methods_with_default_settings[C](cls: type[C]) -> type[C]:
    """Makes the constructor and all public methods of a class run with the settings; properties do not."""
    for name, value in list(vars(cls).items()):
        if isinstance(value, types.FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, with_default_settings(value))
    return cls
