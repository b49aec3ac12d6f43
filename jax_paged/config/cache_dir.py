"""Folder of the files that jax-paged caches."""

import os


def cache_dir(name: str) -> str:
    """Returns the folder for cached files of one type.

    It is in XDG_CACHE_HOME, or in ~/.cache if that is not set. For a user without a home directory, which is
    common in containers, it is in /.cache.

    Args:
        name: Name of the folder: "compiled" for compiled steps, "kernel-checks", or "models".
    """
    home = os.path.expanduser("~")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("/" if home == "~" else home, ".cache")
    return os.path.join(base, "jax-paged", name)
