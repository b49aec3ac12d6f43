"""Products with packed kernels: against NumPy in float64, alone and in any batch, and with oneDNN missing."""

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.pallas_kernels import native
from jax_paged.pallas_kernels.native import products

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
PROBLEM = products.problem(FLOAT32)
needs_onednn = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))

# [in, out]: one column, slices whole and partial, odd sizes.
SHAPES = [(1, 1), (33, 17), (64, 1), (100, 130), (512, 512), (130, 300), (257, 1031), (2048, 512)]
ROWS = (1, 2, 3, 7, 8, 16, 33, 64, 127, 128, 129, 300)
EXACT_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
}
# The largest relative error of rounding: 24 and 8 bits of precision.
ROUNDING = {FLOAT32: 2.0**-24, BFLOAT16: 2.0**-8}


def operands(rows: int, shape: tuple[int, int], dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows + sum(shape))
    x, kernel = rng.standard_normal((rows, shape[0])), rng.standard_normal(shape)
    return jnp.asarray(x, dtype), jnp.asarray(kernel, dtype)


def assert_close(y: jax.Array, x: jax.Array, kernel: jax.Array) -> None:
    """Checks each element against the bound for sums in float32, in whatever order they are made."""
    x64, kernel64 = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    expected = x64 @ kernel64
    bound = (kernel.shape[0] + 1) * ROUNDING[FLOAT32] * (np.abs(x64) @ np.abs(kernel64))
    bound += ROUNDING[y.dtype] * np.abs(expected)
    assert (np.abs(np.asarray(y, np.float64) - expected) <= bound).all()


@needs_onednn
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_products_are_right(shape: tuple[int, int], dtype: jnp.dtype) -> None:
    if products.problem(dtype) is not None:
        pytest.skip(str(products.problem(dtype)))
    for rows in ROWS:
        x, kernel = operands(rows, shape, dtype)
        packed = products.pack(kernel)
        for result_type in {dtype, FLOAT32}:
            y = products.multiply(x, packed, shape[1], result_type)
            assert (y.shape, y.dtype) == ((rows, shape[1]), result_type)
            assert_close(y, x, kernel)


@needs_onednn
@pytest.mark.parametrize("activation", EXACT_ACTIVATIONS)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_gated_products_are_right(dtype: jnp.dtype, activation: str) -> None:
    """Against the same in float64, of activations that move by at most 1.2 where their argument moves by 1.

    oneDNN computes them by polynomials, which may be off by 16 roundings of float32.
    """
    if products.problem(dtype) is not None:
        pytest.skip(str(products.problem(dtype)))
    for shape in [(33, 17), (100, 130), (257, 1031), (512, 512)]:
        for rows in (1, 3, 64, 129):
            x, gate = operands(rows, shape, dtype)
            up = jnp.flip(gate, axis=0)
            y = products.multiply_gated(x, products.pack(gate), products.pack(up), shape[1], activation)
            assert (y.shape, y.dtype) == ((rows, shape[1]), dtype)
            x64, gate64, up64 = (np.asarray(a, np.float64) for a in (x, gate, up))
            with jax.enable_x64(True):
                active = np.asarray(EXACT_ACTIVATIONS[activation](jnp.asarray(x64 @ gate64)))
            factors = x64 @ up64
            sums = (shape[0] + 1) * ROUNDING[FLOAT32]
            active_error = 1.2 * sums * (np.abs(x64) @ np.abs(gate64))
            active_error += 16 * ROUNDING[FLOAT32] * np.abs(x64 @ gate64)
            factor_error = sums * (np.abs(x64) @ np.abs(up64)) + ROUNDING[dtype] * np.abs(factors)
            bound = active_error * np.abs(factors) + factor_error * (np.abs(active) + active_error)
            bound += ROUNDING[dtype] * np.abs(active * factors)
            assert (np.abs(np.asarray(y, np.float64) - active * factors) <= bound).all()


@needs_onednn
def test_an_unknown_activation_is_an_error() -> None:
    x, kernel = operands(2, (64, 64), FLOAT32)
    packed = products.pack(kernel)
    with pytest.raises(jax.errors.JaxRuntimeError, match="unknown activation mish"):
        products.multiply_gated(x, packed, packed, 64, "mish")


@needs_onednn
def test_leading_dimensions_are_rows() -> None:
    x, kernel = operands(30, (64, 100), FLOAT32)
    packed = products.pack(kernel)
    y = products.multiply(x.reshape(2, 3, 5, 64), packed, 100, FLOAT32)
    np.testing.assert_array_equal(y.reshape(30, 100), products.multiply(x, packed, 100, FLOAT32))


@needs_onednn
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_a_transposed_kernel_packs_alike(dtype: jnp.dtype) -> None:
    _, kernel = operands(1, (257, 1031), dtype)
    transposed = products.pack(jnp.asarray(kernel.T), transposed=True)
    np.testing.assert_array_equal(products.pack(kernel), transposed)


@needs_onednn
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_float32_row_is_the_same_in_any_batch(shape: tuple[int, int]) -> None:
    x, kernel = operands(max(ROWS), shape, FLOAT32)
    packed = products.pack(kernel)
    together = np.asarray(products.multiply(x, packed, shape[1], FLOAT32))
    for rows in ROWS:
        for first in (0, (max(ROWS) - rows) // 2):
            part = products.multiply(x[first : first + rows], packed, shape[1], FLOAT32)
            np.testing.assert_array_equal(part, together[first : first + rows])


@needs_onednn
def test_what_other_rows_hold_does_not_matter() -> None:
    x, kernel = operands(40, (64, 100), FLOAT32)
    packed = products.pack(kernel)
    broken = x.at[7].set(jnp.nan)
    others = np.arange(40) != 7
    y = np.asarray(products.multiply(broken, packed, 100, FLOAT32))
    np.testing.assert_array_equal(y[others], products.multiply(x, packed, 100, FLOAT32)[others])
    assert np.isnan(y[7]).all()


@needs_onednn
def test_products_of_several_programs_at_once() -> None:
    """They share XLA's threads, and each thread its buffers."""
    cases = [operands(rows, shape, FLOAT32) for rows in (1, 5, 130) for shape in ((64, 700), (300, 520))]
    packed = [products.pack(kernel) for _, kernel in cases]
    multiply = jax.jit(products.multiply, static_argnums=(2, 3))

    def run(i: int) -> np.ndarray:
        x, kernel = cases[i % len(cases)]
        return np.asarray(multiply(x, packed[i % len(cases)], kernel.shape[1], FLOAT32))

    expected = [run(i) for i in range(len(cases))]
    with ThreadPoolExecutor(8) as pool:
        for i, y in enumerate(pool.map(run, range(600))):
            np.testing.assert_array_equal(y, expected[i % len(cases)])


def run_python(code: str, *arguments: object, **environment: str) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(
        command, check=False, env=os.environ | environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


DIGEST = """
import hashlib, os, sys
if sys.argv[1] == "alone":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
from jax_paged.pallas_kernels.native import products
rng = np.random.default_rng(0)
x, kernel = (rng.standard_normal(shape, np.float32) for shape in ((200, 300), (300, 520)))
import jax.numpy as jnp
y = products.multiply(jnp.asarray(x), products.pack(jnp.asarray(kernel)), 520, jnp.dtype("float32"))
print(hashlib.sha256(np.asarray(y)).hexdigest())
"""


@needs_onednn
def test_neither_threads_nor_the_environment_change_float32() -> None:
    """One thread makes wider slices; oneDNN's variable would allow bfloat16 in float32 products."""
    digest = run_python(DIGEST, "all")
    assert run_python(DIGEST, "alone") == digest
    assert run_python(DIGEST, "all", ONEDNN_DEFAULT_FPMATH_MODE="ANY", OMP_NUM_THREADS="7") == digest


OLD_PROCESSOR = """
import jax.numpy as jnp
from jax_paged.pallas_kernels.native import products
print(products.resolve_matmul_backend("auto", jnp.dtype("bfloat16")), products.problem(jnp.dtype("bfloat16")))
"""


@needs_onednn
def test_a_processor_without_packed_products_keeps_those_of_xla() -> None:
    out = run_python(OLD_PROCESSOR, ONEDNN_MAX_CPU_ISA="AVX2")
    assert out == "xla it does not support packed weights of bfloat16 on this processor\n"


VERSION = """
struct {{ int major, minor, patch; const char* hash; unsigned cpu_runtime, gpu_runtime; }} version = {{{}}};
extern "C" const void* dnnl_version() {{ return &version; }}
"""
LOADED = """
import ctypes, sys
from jax_paged.pallas_kernels import native
load = native.library().jax_paged_load_onednn
load.restype = ctypes.c_char_p
for path in sys.argv[1:]:
    print(load(path.encode()).decode())
"""


@pytest.mark.skipif(not native.is_built() or shutil.which("g++") is None, reason="needs the library and g++")
def test_libraries_that_do_not_fit_are_named(tmp_path: Path) -> None:
    versions = {
        "old": '2, 6, 3, "", 2, 0',
        "sycl": '3, 5, 0, "", 512, 512',
        "empty": '3, 2, 0, "", 1, 0',
        "without_openmp": '3, 2, 0, "", 2, 0',
    }
    for name, version in versions.items():
        (tmp_path / f"{name}.cc").write_text(VERSION.format(version))
        command = ["g++", "-shared", "-fPIC", f"{name}.cc", "-o", f"{name}.so"]
        subprocess.run(command, cwd=tmp_path, check=True)
    (tmp_path / "text.so").write_text("no library")
    paths = [tmp_path / f"{name}.so" for name in [*versions, "text", "missing"]]
    old, sycl, empty, without_openmp, text, missing = run_python(LOADED, *paths).splitlines()
    assert old == "it is version 2.6.3; allowed: 3.x"
    assert sycl == "its threads are of kind 512; allowed: a build with OpenMP, or without threads"
    assert empty == "it has no function dnnl_engine_create"
    assert without_openmp == "it has no function omp_get_max_threads"
    assert "text.so: file too short" in text or "invalid ELF header" in text
    assert "missing.so: cannot open shared object file" in missing


ABSENT = """
import jax.numpy as jnp
from jax_paged.pallas_kernels.native import products
products._find = lambda: "libnowhere.so.3"
dtype = jnp.dtype("float32")
print(products.resolve_matmul_backend("auto", dtype))
for call in (
    lambda: products.resolve_matmul_backend("onednn", dtype, name="matmul_backend"),
    lambda: products.pack(jnp.zeros((2, 2))),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""


@pytest.mark.skipif(not native.is_built(), reason="needs the library")
def test_without_onednn_xla_multiplies() -> None:
    chosen, refused, unpacked = run_python(ABSENT).splitlines()
    reason = (
        "libnowhere.so.3 can't be used (libnowhere.so.3: cannot open shared object file: No such file or "
        "directory); run pip install 'jax-paged[onednn]'"
    )
    assert chosen == "xla"
    wanted = f"`matmul_backend` must be 'auto' or 'xla' because oneDNN can't be used ({reason}), got 'onednn'"
    assert refused == wanted
    assert unpacked == f"the weights can't be packed for oneDNN: {reason}"


def test_without_the_native_library_xla_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_load", lambda: "it was not compiled")
    assert products.resolve_matmul_backend("auto", FLOAT32) == "xla"
    with pytest.raises(ValueError, match=r"`matmul_backend` must be .*it was not compiled.*got 'onednn'"):
        products.resolve_matmul_backend("onednn", FLOAT32, name="matmul_backend")


def test_unknown_products_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"`matmul_backend` must be one of 'auto', 'onednn', 'xla'.*got 'mkl'"
    ):
        products.resolve_matmul_backend("mkl", FLOAT32)


@needs_onednn
def test_a_packed_kernel_of_another_shape_is_refused() -> None:
    x, kernel = operands(3, (64, 100), FLOAT32)
    packed = products.pack(kernel)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a packed kernel has another size"):
        jax.block_until_ready(products.multiply(x, packed, 1000, FLOAT32))


@needs_onednn
def test_sizes_of_packed_kernels() -> None:
    """Sizes that are multiples of 64 cost nothing."""
    assert products.pack(jnp.zeros((512, 768), BFLOAT16)).nbytes == 512 * 768 * 2
    assert products.pack(jnp.zeros((64, 1), FLOAT32)).nbytes <= 64 * 64 * 4
    assert isinstance(native.library(), ctypes.CDLL)
