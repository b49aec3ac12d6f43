"""JAX's compilation cache on disk: its folder and its size limit."""

import contextlib
import functools
import logging
import os
import tempfile
from pathlib import Path

import jax

from jax_paged.config.cache_dir import cache_dir
from jax_paged.config.engine_args import max_cache_bytes

_LOGGER = logging.getLogger(__name__)

# Minimum size of a cache entry (bytes) that keeps JAX from writing to a read-only cache.
_MIN_BYTES_FOR_READ_ONLY = 2**62


def use_persistent_cache() -> None:
    """Turns on JAX's compilation cache for programs of any size, unless the user has configured it.

    If the folder is not writable, one warning is logged. Programs that the folder already contains are still
    read.

    Raises:
        ValueError: If JAX_PAGED_CACHE_GB is not a valid size.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    max_cache_bytes()  # raises ValueError now, not later in a background thread
    folder = Path(cache_dir("compiled"))
    min_entry_bytes = -1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _warn_not_writable(folder, str(error))
        if not os.path.isdir(folder):
            return
        min_entry_bytes = _MIN_BYTES_FOR_READ_ONLY
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", min_entry_bytes)


@functools.cache
def _warn_not_writable(folder: Path, reason: str) -> None:
    """Logs a warning, once per process for the same folder and reason."""
    _LOGGER.warning(
        "compiled programs are not stored for the next start because %s is not writable (%s); set "
        "XDG_CACHE_HOME or JAX_COMPILATION_CACHE_DIR to a writable folder",
        folder,
        reason,
    )


def bound_persistent_cache() -> None:
    """Deletes the least recently used programs of the default cache if it exceeds its limit.

    If the user has configured a folder or a size limit for JAX's compilation cache, nothing is deleted.
    """
    folder = Path(cache_dir("compiled"))
    if (
        jax.config.jax_compilation_cache_dir == str(folder)
        and jax.config.jax_compilation_cache_max_size == -1
    ):
        evict(folder, max_cache_bytes())


def evict(folder: Path, max_bytes: float) -> None:
    """Deletes the least recently used files of a folder until the rest has at most `max_bytes`.

    The file system's access and modification times tell when a file was last used. Other processes may read,
    write and evict at the same time. If a program's file is missing, JAX compiles the program and writes the
    file again.
    """
    found = []
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            with contextlib.suppress(OSError):  # another process may have deleted it
                stat = file.stat()
                found.append((max(stat.st_atime_ns, stat.st_mtime_ns), stat.st_size, file))
    num_bytes = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if num_bytes <= max_bytes:
            break
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
            num_bytes -= size
