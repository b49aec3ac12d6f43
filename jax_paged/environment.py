"""The environment variables that are read, but those of launchers."""

import os


def cache_dir(name: str) -> str:
    """Returns the folder of that name for what is kept between runs: "compiled" steps, "kernel-checks"."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "jax-paged", name)


def checks_inputs() -> bool:
    """Returns whether every kernel's arguments are checked on the host, which JAX_PAGED_CHECKS=1 asks for."""
    return os.environ.get("JAX_PAGED_CHECKS") == "1"


def api_key_of_environment() -> str | None:
    """Returns the key that clients of a server must send, JAX_PAGED_API_KEY; None if it is not set."""
    return os.environ.get("JAX_PAGED_API_KEY")
