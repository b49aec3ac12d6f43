"""Bugs planted in the kernels for Blackwell, which the emulator must find; and none where there is none.

They need a compiler for GPUs, and a process of their own (make kernels-emulate): in one process, JAX compiles
for the generation of GPUs that it has compiled for first.
"""

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_planted_bugs import ATTENTION, is_wrong, leave_out, pytestmark  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def _alone():
    from ptx_emulator.gpu import emulated_gpu

    if emulated_gpu.cache_info().currsize:
        pytest.skip("needs a process of its own")
    yield
    emulated_gpu.cache_clear()


@pytest.mark.parametrize("op", ATTENTION)
def test_nothing_planted(op, monkeypatch):
    from ptx_emulator.gpu import emulated_gpu

    monkeypatch.setattr(emulated_gpu("b200"), "num_schedules", 2)
    assert not is_wrong("b200", op)


# Keys and values, of full and of masked steps.
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("op", ["decode", "ragged"])
def test_a_missing_wait(op, number, monkeypatch):
    calls = leave_out(monkeypatch, plgpu, "barrier_wait", number)
    assert is_wrong("b200", op)
    assert len(calls) == 4


def test_a_missing_fence(monkeypatch):
    """Of full steps: in this case masked ones are the last, whose stages are not filled again."""
    calls = leave_out(monkeypatch, plgpu, "commit_smem", 0)
    assert is_wrong("b200", "ragged")
    assert len(calls) == 2
