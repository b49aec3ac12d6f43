"""The native CPU backend: C++ operations that XLA calls through its foreign function interface (FFI).

The C++ sources in this folder are compiled into one shared library when jax-paged is installed, if a C++
compiler is available. `target` registers a handler of the library with XLA. `attention.py` wraps the
operations on the KV cache, `products.py` the matrix products of oneDNN, and `quantized_products.py` those
with quantized weights. `is_built` and `problem` tell callers whether the library can be used.
"""

import ctypes
import functools
import sysconfig
from pathlib import Path

import jax

from jax_paged.pallas_kernels.native.sources import digest

# Advice for error messages if the library is missing.
INSTALL_HINT = "install a C++ compiler (such as g++), then install jax-paged again"


def is_built() -> bool:
    """Returns whether the native library exists and works with this version of JAX."""
    return problem() is None


def problem() -> str | None:
    """Returns the reason why the native library cannot be used; None if it can.

    The reason is a clause without a full stop.
    """
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


@functools.cache
def target(symbol: str) -> str:
    """Registers a handler of the library with XLA, once, and returns its name for jax.ffi.ffi_call.

    Args:
        symbol: Name of the handler in C++, which is also its FFI target name.

    Raises:
        RuntimeError: If the library cannot be used.
    """
    jax.ffi.register_ffi_target(symbol, jax.ffi.pycapsule(getattr(library(), symbol)), platform="cpu")
    return symbol


def library() -> ctypes.CDLL:
    """Returns the library.

    Raises:
        RuntimeError: If the library cannot be used.
    """
    loaded = _load()
    if isinstance(loaded, str):
        raise RuntimeError(f"the native backend can't be used: {loaded}")
    return loaded


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Returns the library, or the reason why it cannot be used."""
    path = Path(__file__).with_name("_library" + str(sysconfig.get_config_var("EXT_SUFFIX")))
    if not path.exists():
        return f"it was not compiled when jax-paged was installed; {INSTALL_HINT}"
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        return f"its library can't be loaded ({error}); {INSTALL_HINT}"
    # Handlers compiled from other sources may take other arguments. Calling them could give wrong results or
    # crash.
    if (now := digest(path.parent)) is not None and now != _compiled_from(loaded):
        what = "its library is out of date because the C++ sources have changed since it was compiled"
        return f"{what}; install jax-paged again (in a clone: make setup)"
    return loaded


def _compiled_from(loaded: ctypes.CDLL) -> str | None:
    try:
        function = loaded.jax_paged_sources
    except AttributeError:  # built before the library had this function
        return None
    function.restype = ctypes.c_char_p
    return function().decode()
