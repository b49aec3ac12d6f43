"""The option --emulate: tests marked "gpu" run in the emulator, on a machine that has no GPU."""

from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulate",
        choices=["h100", "a100", "b200", "rtx5090"],
        help="with -m gpu: run the PTX of the kernels in the emulator (needs jax[cuda13], but no GPU)",
    )
    parser.addoption(
        "--schedules",
        type=int,
        default=1,
        help="with --emulate: run each kernel so often, in another order, and compare the results",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    name = item.config.getoption("--emulate")
    if name is None or item.get_closest_marker("gpu") is None:
        return (yield)
    from ptx_emulator.gpu import emulated_gpu  # which compiles for the GPU: only where it is asked for

    gpu = emulated_gpu(name)
    gpu.num_schedules = item.config.getoption("--schedules")
    with gpu.installed():
        return (yield)
