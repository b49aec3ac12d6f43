"""One compilation cache for a whole run of the tests, the programs that they start included.

Most of what the tests cost is compiling, and many of their engines are equal. The cache stays in the checkout
(.pytest_cache/compiled), so that the next run starts warm. A cache that the environment names is kept.
"""

import gc
import os

import jax
import pytest

from jax_paged.worker.compilation.compiler import trim_heap

SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


# Each program holds memory maps, of which Linux gives a process 65,530; one file had come to 47,000 of them.
MAX_TESTS_PER_CLEARING = 100


class CacheClearing:
    """Frees what JAX keeps of compiled programs after each file, and within long files."""

    def __init__(self) -> None:
        self._num_tests = 0

    @pytest.hookimpl(trylast=True)  # after the fixtures of the file have closed their engines
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        self._num_tests += 1
        is_last_of_file = nextitem is None or nextitem.path != item.path
        if is_last_of_file or self._num_tests == MAX_TESTS_PER_CLEARING:
            self._num_tests = 0
            gc.collect()
            jax.clear_caches()
            trim_heap()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CacheClearing())
    if jax.config.jax_compilation_cache_dir is not None:
        return
    folder = config.rootpath / ".pytest_cache" / "compiled"
    for name, value in {"jax_compilation_cache_dir": str(folder), **SETTINGS}.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for the programs that tests start
