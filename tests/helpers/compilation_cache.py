"""One compilation cache for a whole run of the tests, the programs that they start included.

Most of what the tests cost is compiling, and many of their engines are equal. The cache stays in the checkout
(.pytest_cache/compiled), so that the next run starts warm. A cache that the environment names is kept.
"""

import os
from collections.abc import Iterator

import jax
import pytest

SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def pytest_configure(config: pytest.Config) -> None:
    if jax.config.jax_compilation_cache_dir is not None:
        return
    folder = config.rootpath / ".pytest_cache" / "compiled"
    for name, value in {"jax_compilation_cache_dir": str(folder), **SETTINGS}.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for the programs that tests start


@pytest.fixture(scope="module", autouse=True)
def drop_compiled_programs() -> Iterator[None]:
    """A file's programs go with it: each of them holds memory maps, of which Linux gives a process 65,530."""
    yield
    jax.clear_caches()
