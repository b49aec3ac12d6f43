"""No kernel may race; and --emulate runs the tests for GPUs on one that is not there."""

import pytest

RACE = "RACE DETECTED"


def pytest_addoption(parser):
    parser.addoption(
        "--emulate",
        choices=["h100", "a100"],
        help="with -m gpu: run the kernels' PTX in the emulator (needs jax[cuda13], and no GPU)",
    )


@pytest.fixture(autouse=True)
def _emulated(request):
    name = request.config.getoption("--emulate", None)
    if name is None or request.node.get_closest_marker("gpu") is None:
        yield
        return
    from ptx_emulator.gpu import emulated_gpu

    with emulated_gpu(name).installed():
        yield


@pytest.fixture(autouse=True)
def _no_races(request, capsys):
    """jax 0.12's interpreter raises at a race, 0.11's prints it and goes on."""
    yield
    out = capsys.readouterr().out
    print(out, end="")
    assert RACE not in out or request.node.originalname == "test_a_missing_wait_is_caught"
