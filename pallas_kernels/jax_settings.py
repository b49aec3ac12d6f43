"""JAX settings for this package's computations: JAX's defaults, whatever the user's program has set.

A user's program may, for example, enable 64-bit types. This would change the dtypes of intermediate arrays,
and with them the results, the memory use and the operands of native code. The functions here apply the
default settings to a scope of the current thread, without affecting the rest of the process.
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
    "threefry_partitionable": True,  # determines the random bits generated for a key
}


@contextlib.contextmanager
def default_settings() -> Iterator[None]:
    """Applies the settings in the current thread until the `with` block ends."""
    import jax  # not at module level, because the engine must be importable without JAX

    with contextlib.ExitStack() as stack:
        for name, value in _SETTINGS.items():
            stack.enter_context(getattr(jax, name)(value))
        yield


def apply_to_process() -> None:
    """Applies the settings to all threads. For processes that run no other JAX code."""
    import jax

    for name, value in _SETTINGS.items():
        jax.config.update(f"jax_{name}", value)


def with_default_settings[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Decorates `function` so that the settings apply while it runs or is traced."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with default_settings():
            return function(*args, **kwargs)

    return call


def methods_with_default_settings[C](cls: type[C]) -> type[C]:
    """Class decorator that applies the settings in the constructor and the public methods.

    They are not applied in properties and private methods.
    """
    for name, value in list(vars(cls).items()):
        if isinstance(value, types.FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, with_default_settings(value))
    return cls
