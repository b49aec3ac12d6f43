"""One compilation cache for a whole run of the tests, the programs that they start included.

Most of what the tests cost is compiling, and many of their engines are equal. The cache stays in the checkout
(.pytest_cache/compiled), so that the next run starts warm. A cache that the environment names is kept.
"""

import os

import jax
import pytest

SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


# Each program holds memory maps, of which Linux gives a process 65,530; one file had come to 47,000 of them.
TESTS_THAT_SHARE_PROGRAMS = 100


class ProgramsGoNowAndThen:
    """Drops what JAX keeps compiled, after so many tests."""

    def __init__(self) -> None:
        self._num_tests = 0

    def pytest_runtest_teardown(self) -> None:
        self._num_tests += 1
        if self._num_tests % TESTS_THAT_SHARE_PROGRAMS == 0:
            jax.clear_caches()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProgramsGoNowAndThen())
    if jax.config.jax_compilation_cache_dir is not None:
        return
    folder = config.rootpath / ".pytest_cache" / "compiled"
    for name, value in {"jax_compilation_cache_dir": str(folder), **SETTINGS}.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for the programs that tests start
