"""The native CPU backend: ops in C++, which XLA calls through its foreign function interface.

The sources beside this file are compiled into one shared library when the package is installed, if there is a
C++ compiler. Every handler in it is an FFI target of the name that its C++ symbol has.
"""

import ctypes
import functools
import sysconfig
from pathlib import Path

import jax

from jax_paged.pallas_kernels.native.sources import digest

# What to do where the library is missing.
INSTALL_HINT = "install a C++ compiler (such as g++), then install jax-paged again"


def is_built() -> bool:
    """Returns whether the native library is there and works with this version of JAX."""
    return problem() is None


def problem() -> str | None:
    """Returns why the native library can't be used, None if it can: a clause without a full stop."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


@functools.cache
def target(symbol: str) -> str:
    """Registers a handler of the library with XLA, once; returns its name for jax.ffi.ffi_call.

    Args:
        symbol: Its name in C++.

    Raises:
        RuntimeError: If the library can't be used.
    """
    jax.ffi.register_ffi_target(symbol, jax.ffi.pycapsule(getattr(library(), symbol)), platform="cpu")
    return symbol


def library() -> ctypes.CDLL:
    """Returns the library.

    Raises:
        RuntimeError: If it can't be used.
    """
    loaded = _load()
    if isinstance(loaded, str):
        raise RuntimeError(f"the native backend can't be used: {loaded}")
    return loaded


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Returns the library, or why there is none."""
    path = Path(__file__).with_name("_library" + str(sysconfig.get_config_var("EXT_SUFFIX")))
    if not path.exists():
        return f"it was not compiled when jax-paged was installed; {INSTALL_HINT}"
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        return f"its library does not load ({error}); {INSTALL_HINT}"
    # Handlers that were compiled from other sources take other arguments: results would be wrong, or worse.
    if (now := digest(path.parent)) is not None and now != _compiled_from(loaded):
        what = "its library was compiled from other sources than those beside it"
        return f"{what}; install jax-paged again (in a clone: make setup)"
    return loaded


def _compiled_from(loaded: ctypes.CDLL) -> str | None:
    try:
        function = loaded.jax_paged_sources
    except AttributeError:  # older than this check
        return None
    function.restype = ctypes.c_char_p
    return function().decode()
