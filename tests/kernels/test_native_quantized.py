"""Products with packed quantized kernels on a CPU: against NumPy in float64, in any batch, and planted bugs.

native_quantized.cc tests many more shapes without XLA.
"""

import ctypes
import dataclasses
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_paged.pallas_kernels import native
from jax_paged.pallas_kernels.native import quantized_products as products

SOURCES = Path(__file__).parents[2] / "pallas_kernels" / "native"
PROGRAM = Path(__file__).with_name("native_quantized.cc")
pytestmark = pytest.mark.skipif(not native.is_built(), reason=f"native: {native.problem()}")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# kind, rows, columns, rows per group, zero points or offsets, whether rows are permuted, dtype of the scales
SCHEMES = {
    "int4": ("int4", 256, 100, 64, None, False, "float32"),
    "int4 zeros": ("int4", 128, 33, 32, "zeros", False, "bfloat16"),
    "int4 offsets": ("int4", 96, 144, 32, "offsets", False, "float16"),
    "int4 act-order": ("int4", 192, 50, 48, "zeros", True, "float32"),
    "int4 short group": ("int4", 72, 20, 64, "offsets", False, "float32"),
    "int8 column": ("int8", 301, 70, 301, None, False, "float32"),
    "int8 groups": ("int8", 320, 16, 16, "zeros", False, "float16"),
    "fp8 column": ("fp8", 130, 65, 130, None, False, "float32"),
    "fp8 blocks": ("fp8", 512, 40, 128, None, False, "bfloat16"),
}


@dataclasses.dataclass
class Kernel:
    """A random kernel: its arrays for `pack`, the matrix, and the magnitudes that its rounding depends on."""

    values: np.ndarray
    scales: np.ndarray
    options: dict[str, Any]
    matrix: np.ndarray
    magnitude: np.ndarray

    def packed(self) -> products.PackedQuantized:
        return products.pack(self.values, self.scales, **self.options)


def make_kernel(name: str, seed: int = 0) -> Kernel:
    kind, rows, columns, group, extra, is_permuted, scale_dtype = SCHEMES[name]
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if kind == "int4":
        numbers: np.ndarray = rng.integers(0, 16, (rows, columns))
        values = (numbers[::2] | numbers[1::2] << 4).astype(np.uint8)
    elif kind == "int8":
        numbers = values = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
    else:
        bits = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
        values = np.where(bits & 127 == 127, 0, bits).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
        numbers = values
    shape = -(-rows // group), columns
    scales = rng.uniform(0.1, 1, shape).astype(scale_dtype)
    order = rng.permutation(rows).astype(np.int32) if is_permuted else np.arange(rows, dtype=np.int32)
    own = np.argsort(order) // group
    options: dict[str, Any] = {"kind": kind, "group_size": group}
    options |= {"permutation": order} if is_permuted else {}
    numbers, scale = numbers.astype(np.float64), scales.astype(np.float64)[own]
    matrix, magnitude = numbers * scale, np.abs(numbers) * scale
    if extra == "zeros":
        options["offsets"] = rng.integers(0, 16, shape).astype(np.uint8 if kind == "int4" else np.int8)
        moved = options["offsets"].astype(np.float64)[own] * scale
        matrix, magnitude = matrix - moved, magnitude + np.abs(moved)
    elif extra == "offsets":
        options["offsets"] = rng.normal(size=shape).astype(scale_dtype)
        moved = options["offsets"].astype(np.float64)[own]
        matrix, magnitude = matrix + moved, magnitude + np.abs(moved)
    return Kernel(values, scales, options, matrix, magnitude)


def rows_of(rows: int, kernel: Kernel, dtype: str = "float32") -> jax.Array:
    rng = np.random.default_rng(rows)
    return jnp.asarray(rng.normal(size=(rows, len(kernel.matrix))), dtype)


def assert_close(y: jax.Array, x: jax.Array, kernel: Kernel) -> None:
    """Checks each element: a sum is wrong by a rounding per summand, and the result is rounded once."""
    x64 = np.asarray(x, np.float64)
    expected = x64 @ kernel.matrix
    bound = (len(kernel.matrix) + 8) * ROUNDING["float32"] * (np.abs(x64) @ kernel.magnitude)
    bound += ROUNDING[y.dtype.name] * (np.abs(expected) + bound)
    assert (np.abs(np.asarray(y, np.float64) - expected) <= bound).all()


@pytest.mark.parametrize("max_width", [4, 8, 16])
@pytest.mark.parametrize("name", SCHEMES)
def test_products_are_right(name: str, max_width: int) -> None:
    kernel = make_kernel(name)
    packed = kernel.packed()
    for rows in (1, 7, 33):
        x = rows_of(rows, kernel)
        y = products.multiply(x, packed, "float32", max_width=max_width)
        assert y.shape == (rows, kernel.matrix.shape[1])
        assert_close(y, x, kernel)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_activations_of_two_bytes(dtype: str) -> None:
    kernel = make_kernel("int4 offsets")
    for result in (dtype, "float32"):
        x = rows_of(5, kernel, dtype)
        y = products.multiply(x, kernel.packed(), result)
        assert y.dtype == result
        assert_close(y, x, kernel)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_row_is_the_same_in_any_batch(name: str) -> None:
    kernel = make_kernel(name)
    packed, x = kernel.packed(), rows_of(300, kernel)
    together = np.asarray(products.multiply(x, packed, "float32"))
    for rows in (1, 3, 4, 6, 13):
        np.testing.assert_array_equal(products.multiply(x[:rows], packed, "float32"), together[:rows])
    broken = products.multiply(x.at[1].set(jnp.nan), packed, "float32")
    np.testing.assert_array_equal(np.delete(broken, 1, axis=0), np.delete(together, 1, axis=0))


@pytest.mark.parametrize("name", SCHEMES)
def test_columns_are_those_of_the_matrix(name: str) -> None:
    kernel = make_kernel(name)
    indices = jnp.array([[0, 15], [16 % kernel.matrix.shape[1], kernel.matrix.shape[1] - 1]])
    found = products.columns(kernel.packed(), indices, jnp.float32)
    bound = 4 * ROUNDING["float32"] * kernel.magnitude.T[indices]
    assert (np.abs(np.asarray(found, np.float64) - kernel.matrix.T[indices]) <= bound).all()
    outside = products.columns(kernel.packed(), jnp.array([-1, kernel.matrix.shape[1]]), jnp.float32)
    assert np.isnan(outside).all()


EXACT_ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: np.asarray(jax.nn.gelu(jnp.asarray(x), approximate=False)),
    "gelu_new": lambda x: np.asarray(jax.nn.gelu(jnp.asarray(x))),
    "gelu_pytorch_tanh": lambda x: np.asarray(jax.nn.gelu(jnp.asarray(x))),
}


@pytest.mark.parametrize("activation", products.ACTIVATIONS)
def test_gated_products_are_right(activation: str) -> None:
    """Activations move by at most 1.2 where their argument moves by 1, and are right to 16 roundings."""
    gate, up = make_kernel("int4 zeros"), make_kernel("int4 zeros", seed=1)
    for rows in (1, 40):
        x = rows_of(rows, gate) / 64
        y = products.multiply_gated(x, gate.packed(), up.packed(), activation)
        x64 = np.asarray(x, np.float64)
        with jax.enable_x64(True):
            argument, factors = x64 @ gate.matrix, x64 @ up.matrix
            active = EXACT_ACTIVATIONS[activation](argument)
        sums = (len(gate.matrix) + 8) * ROUNDING["float32"]
        error = 1.2 * sums * (np.abs(x64) @ gate.magnitude) + 16 * ROUNDING["float32"] * np.abs(argument)
        factor_error = sums * (np.abs(x64) @ up.magnitude)
        bound = error * np.abs(factors) + factor_error * (np.abs(active) + error)
        bound += 2 * ROUNDING["float32"] * np.abs(active * factors)
        assert (np.abs(np.asarray(y, np.float64) - active * factors) <= bound).all()


def test_experts() -> None:
    kernels = [make_kernel("int4 offsets", seed=i) for i in range(4)]
    values, scales, offsets = (
        np.stack([pick(k) for k in kernels])
        for pick in (lambda k: k.values, lambda k: k.scales, lambda k: k.options["offsets"])
    )
    packed = products.pack(values, scales, kind="int4", group_size=32, offsets=offsets)
    sizes, x = [3, 0, 9, 1], rows_of(16, kernels[0])
    y = products.multiply(x, packed, "float32", jnp.array(sizes))
    first = 0
    for size, kernel in zip(sizes, kernels, strict=True):
        assert_close(y[first : first + size], x[first : first + size], kernel)
        first += size
    assert (np.asarray(y[first:]) == 0).all()
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="more rows than there are"):
        products.multiply(x, packed, "float32", jnp.array([3, 0, 9, 5])).block_until_ready()


def test_merged_kernels_have_the_columns_of_all() -> None:
    kernels = [make_kernel("int4 zeros", seed=i) for i in range(3)]
    parts = [kernel.packed() for kernel in kernels]
    assert len({products.mergeable(part) for part in parts}) == 1
    whole, starts = products.merged(parts)
    x = rows_of(2, kernels[0])
    y = products.multiply(x, whole, "float32")
    for part, start in zip(parts, starts, strict=True):
        own = products.multiply(x, part, "float32")
        np.testing.assert_array_equal(y[:, start : start + part.layout.columns], own)


def test_the_gradient_is_that_of_the_matrix() -> None:
    kernel = make_kernel("int4 act-order")
    packed, x = kernel.packed(), rows_of(3, kernel)
    weights = np.random.default_rng(0).normal(size=(3, kernel.matrix.shape[1]))
    loss = lambda x: jnp.sum(products.multiply(x, packed, "float32") * weights)  # noqa: E731
    np.testing.assert_allclose(jax.grad(loss)(x), weights @ kernel.matrix.T, rtol=1e-3, atol=1e-3)


def test_a_nan_of_fp8_stays_one() -> None:
    values = np.zeros((32, 20), ml_dtypes.float8_e4m3fn)
    values[17, 3] = np.nan
    packed = products.pack(values, np.ones((2, 20), np.float32), kind="fp8", group_size=16)
    y = np.asarray(products.multiply(jnp.ones((2, 32)), packed, "float32"))
    assert np.isnan(y[:, 3]).all()
    assert (np.delete(y, 3, axis=1) == 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": np.zeros(10, np.uint8)}, "a packed kernel has another size"),
        ({"scales": np.zeros(3, np.float32)}, "scales of a packed kernel have another size"),
        ({"offsets": np.zeros(3, np.uint8)}, "offsets of a packed kernel have another size"),
        ({"permutation": np.full(128, 128, np.int32)}, "index that is out of bounds"),
        ({"permutation": np.full(128, -1, np.int32)}, "index that is out of bounds"),
        ({"permutation": np.zeros(64, np.int32)}, "permutation has another size"),
        ({"group_size": 31}, "multiple of 8"),
        ({"group_size": 0}, "multiple of 8"),
        ({"group_size": -8}, "multiple of 8"),
        ({"group_size": 8}, "another size"),
        ({"columns": 1000}, "another size"),
        ({"kind": "int8"}, "another size"),
        ({"kind": "int5"}, "must be int4, int8 or fp8"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_an_error(changes: dict[str, Any], message: str) -> None:
    kernel = make_kernel("int4 zeros")
    packed = kernel.packed()
    layout = {k: v for k, v in changes.items() if hasattr(packed.layout, k)}
    arrays = {k: v for k, v in changes.items() if k not in layout}
    wrong = dataclasses.replace(packed, layout=dataclasses.replace(packed.layout, **layout), **arrays)
    for call in (
        lambda: products.multiply(rows_of(2, kernel), wrong, "float32"),
        lambda: products.columns(wrong, jnp.arange(3), jnp.float32),
    ):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
            jax.block_until_ready(call())


def test_arrays_that_do_not_fit_are_not_packed() -> None:
    kernel = make_kernel("int4 zeros")
    for options, message in (
        ({"group_size": 12}, "`group_size` must be a multiple of 8"),
        ({"group_size": 64}, "`scales` must have the shape"),
        ({"offsets": np.zeros((1, 33))}, "`offsets` must have the shape"),
        ({"permutation": np.zeros(5)}, "`permutation` must have indices"),
    ):
        with pytest.raises(ValueError, match=message):
            products.pack(kernel.values, kernel.scales, **kernel.options | options)


def test_variants_are_checked() -> None:
    check = native.library().jax_paged_wrong_variant
    check.restype = ctypes.c_char_p
    assert [check(ctypes.c_int64(width)) for width in (4, 8, 16)] == [None] * 3


def build(folder: Path, sources: Path, *arguments: str) -> Path:
    program = folder / "program"
    files = [PROGRAM, sources / "quantized_baseline.cc", sources / "quantized_avx2.cc"]
    options = ["-std=c++17", "-O1", "-w", f"-I{sources}", f"-I{SOURCES}", *arguments]
    subprocess.run(["g++", *options, *map(str, files), "-o", str(program)], check=True, capture_output=True)
    return program


@needs_compiler
@pytest.mark.thorough
def test_random_kernels(tmp_path: Path) -> None:
    program = build(tmp_path, SOURCES, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    result = subprocess.run([program, "2000"], capture_output=True, text=True, check=False)
    assert result.stdout == "2000 tests pass\n", result.stdout + result.stderr


BUGS = {
    "a nibble is not masked": ("0xfu << 4", "0x1fu << 4"),
    "the upper half is not read": ("(of_eight > 3 ? 2 : 0)", "(of_eight > 4 ? 2 : 0)"),
    "zero points are added": ("splat(-x_sums[r])", "splat(x_sums[r])"),
    "the first group counts twice": ("group ? load(to + c * WIDTH)", "group > 1 ? load(to + c * WIDTH)"),
    "a group ends one word late": ("(group + 1) * kernel.group;", "(group + 1) * kernel.group + 8;"),
    "a block forgets what came before": ("continues ? load(unfinished", "!continues ? load(unfinished"),
    "padding is not 0": ("i < n; i++) to[i] = 0;", "i < n; i++) to[i] = 1;"),
    "scales of the first panel": ("((panel + c / PARTS) * kernel.groups", "((panel) * kernel.groups"),
    "a row takes its neighbour's sum": ("splat(x_sums[r]), scale[c]", "splat(x_sums[0]), scale[c]"),
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, tmp_path: Path) -> None:
    for path in SOURCES.glob("quantized*"):
        shutil.copy(path, tmp_path)
    header, (old, new) = tmp_path / "quantized.h", BUGS[bug]
    assert old in header.read_text()
    header.write_text(header.read_text().replace(old, new))
    program = build(tmp_path, tmp_path)
    result = subprocess.run([program, "200"], capture_output=True, text=True, check=False)
    assert result.returncode != 0, result.stdout
