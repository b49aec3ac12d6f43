"""Weights with offsets, and float weights that are quantized while they are loaded."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jax_paged.models.quantization.online import _fit, _to_fp8, quantize_file
from jax_paged.models.quantization.quantize import float_outline, kernel_places, quantize_model
from jax_paged.models.quantization.quantized_linear import (
    QuantizationScheme,
    QuantizedArrays,
    QuantizedWeight,
    dense,
    multiply,
    pack_pairs,
)
from jax_paged.models.weights import load_model, random_checkpoint, random_model
from jax_paged.pallas_kernels import native
from jax_paged.pallas_kernels.native import quantized_products, quantizing

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


@pytest.mark.parametrize("groups_are_ordered", [False, True])
@pytest.mark.parametrize(("rows", "group_size"), [(256, 32), (256, 256), (96, 16), (20, 20)])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_offsets(bits: int, rows: int, group_size: int, groups_are_ordered: bool) -> None:
    rng = np.random.default_rng(rows + bits)
    columns, num_groups = 24, rows // group_size
    values = rng.integers(0, 16, (rows, columns)) if bits == 4 else rng.integers(-128, 128, (rows, columns))
    scales, offsets = (rng.standard_normal((num_groups, columns)).astype(np.float32) for _ in range(2))
    groups = rng.permutation(np.repeat(np.arange(num_groups), group_size)) if groups_are_ordered else None
    of_row: Any = np.repeat(np.arange(num_groups), group_size) if groups is None else groups
    scaled = values * scales.astype(np.float64)[of_row]
    expected = scaled + offsets.astype(np.float64)[of_row]
    packed = pack_pairs(values) if bits == 4 else values.astype(np.int8)
    kind = "uint8" if bits == 4 else "int8"
    scheme = QuantizationScheme(kind, group_size, "int8", has_groups=groups_are_ordered, has_offsets=True)
    given = QuantizedArrays(packed, scales, groups=groups, offsets=offsets)
    arrays = jax.tree.map(jnp.asarray, given)
    weight = QuantizedWeight(scheme, (rows, columns), (None, None), arrays)
    shapes: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    assert scheme.shapes((rows, columns)) == shapes
    for name, array in weight.arrays._asdict().items():
        np.testing.assert_array_equal(array, getattr(arrays, name))
    # Two roundings in float32 per weight.
    bound = 2**-23 * (np.abs(scaled) + np.abs(expected))
    assert (np.abs(np.asarray(dense(arrays, group_size, "float32")) - expected) <= bound).all()
    x = rng.standard_normal((3, rows)).astype(np.float32)
    y = np.asarray(multiply(jnp.asarray(x), arrays, group_size, jnp.float32))
    largest = np.abs(x.astype(np.float64)) @ (np.abs(expected) + np.abs(scaled))
    assert (np.abs(y - x.astype(np.float64) @ expected) <= (rows + 3) * 2**-24 * largest).all()


def int4_oracle(x: np.ndarray, group_size: int) -> np.ndarray:
    """Returns the smallest squared error of each group that rounding within its range achieves."""
    groups = x.reshape(-1, group_size, x.shape[1]).astype(np.float64)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    scale = np.where(high > low, (high - low) / 15, 1)
    rounded = np.clip(np.round((groups - low) / scale), 0, 15) * scale + low
    return np.sum((rounded - groups) ** 2, axis=1)


@pytest.mark.parametrize(("rows", "group_size"), [(192, 64), (96, 32), (48, 16)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_int4_is_better_than_rounding_within_the_range(dtype: str, rows: int, group_size: int) -> None:
    rng = np.random.default_rng(rows)
    x = (rng.standard_t(5, (2, rows, 300)) * rng.uniform(1e-4, 10, 300)).astype(dtype).astype(np.float32)
    for layout in (np.ascontiguousarray(x), np.ascontiguousarray(x.mT).mT):
        arrays = quantize_file(layout, np.dtype("float32"), "int4")
        scheme = QuantizationScheme.online("int4", rows)
        assert scheme.group_size == group_size
        assert jax.tree.map(lambda a: (a.shape, a.dtype), arrays) == jax.tree.map(
            lambda a: (a.shape, a.dtype), scheme.shapes(x.shape)
        )
        found = np.asarray(dense(jax.tree.map(jnp.asarray, arrays), group_size, "float32"))
        for ours, value in zip(found, x, strict=True):
            error = np.sum((ours - value).reshape(-1, group_size, 300).astype(np.float64) ** 2, axis=1)
            simple = int4_oracle(value, group_size)
            assert error.sum() < 0.93 * simple.sum()
            # Scales and offsets in bfloat16 have 8 digits, so a few groups are slightly worse.
            assert (error <= 1.1 * simple).mean() > 0.97


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e6])
def test_int4_of_groups_that_fit_is_exact(scale: float) -> None:
    """Zeros, equal numbers, and multiples of a scale in bfloat16."""
    rng = np.random.default_rng(0)
    scale = float(np.float32(scale).astype(ml_dtypes.bfloat16))
    x = rng.integers(0, 16, (128, 50)).astype(np.float32)
    x[0], x[1], x[64], x[65] = 0, 15, 15, 0  # the whole range
    x[:, 0], x[:, 1], x[64:, 2] = 0, 3, 0
    x = (x - 4) * np.float32(scale)
    x[:, 0] = 0
    arrays = jax.tree.map(jnp.asarray, quantize_file(x, np.dtype("float32"), "int4"))
    np.testing.assert_array_equal(dense(arrays, 64, "float32"), x)


def test_int4_of_far_groups() -> None:
    """The precision of the offset limits the error of numbers that are far from 0."""
    rng = np.random.default_rng(0)
    x = (100 + rng.standard_normal((64, 20))).astype(np.float32)
    arrays = jax.tree.map(jnp.asarray, quantize_file(x, np.dtype("float32"), "int4"))
    assert np.abs(np.asarray(dense(arrays, 64, "float32")) - x).max() < 0.5


def test_rows_without_groups_become_int8(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(LLAMA | {"intermediate_size": 24}, "float32").model
    found = {"/".join(map(str, p.path)): p.kernel for p in kernel_places(quantize_model(model, "int4"))}
    kinds = {
        path.split("/")[-2]: k.scheme.source for path, k in found.items() if isinstance(k, QuantizedWeight)
    }
    assert kinds.pop("down_proj") == "int8"
    assert kinds.pop("lm_head", "int8") == "int8"
    assert set(kinds.values()) == {"int4"}
    assert "down_proj" in caplog.text


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_all_ways_to_load_agree(kind: Any, tmp_path: Path) -> None:
    """Files and models in memory, in float32 and bfloat16, and an outline have the same arrays."""
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / dtype
        random_checkpoint(folder, LLAMA, dtype)
        loaded = load_model(folder, dtype, quantization=kind)
        in_memory = quantize_model(load_model(folder, dtype).model, kind)
        for a, b in zip(kernel_places(loaded.model), kernel_places(in_memory), strict=True):
            if not isinstance(a.kernel, QuantizedWeight):
                continue
            assert a.kernel.scheme == b.kernel.scheme
            is_head = a.path[0] == "lm_head"
            assert a.kernel.scheme.source == ("int8" if is_head and kind == "int4" else kind)
            for x, y in zip(a.kernel.arrays, b.kernel.arrays, strict=True):
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(nnx.state(loaded.model)))
        assert loaded.weight_bytes == size


def test_fp8_is_rounded_like_numpy() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    near = rng.standard_normal(100_000) * 2.0 ** rng.integers(-12, 9, 100_000)
    x = np.clip(np.concatenate([x[~np.isnan(x)], near.astype(np.float32)]), -448, 448)
    expected = x.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(_to_fp8(x).view(np.uint8), expected.view(np.uint8))


@pytest.mark.skipif(not native.is_built(), reason="needs the native library")
@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_int4_is_that_of_xla(size: int, dtype: str) -> None:
    rng = np.random.default_rng(size)
    groups = (rng.standard_t(5, (3000, size)) * rng.uniform(1e-4, 10, (3000, 1))).astype(dtype)
    groups[0], groups[1], groups[2, 1:] = 0, 3, 0
    theirs, ours = ([np.asarray(x) for x in f(groups)] for f in (_fit, quantizing.quantize_groups))
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in theirs]
    # Sums in another order change a few of the choices between nearly equal errors.
    for a, b in zip(ours, theirs, strict=True):
        assert (a == b).mean() > 0.98
    errors = []
    for values, scales, offsets in (ours, theirs):
        q = np.stack([values & 15, values >> 4], -1).reshape(-1, size)
        found = q * scales.astype(np.float64)[:, None] + offsets.astype(np.float64)[:, None]
        errors.append(np.sum((found - groups.astype(np.float64)) ** 2, axis=1))
    assert np.isclose(*errors, rtol=0.01, atol=1e-12).mean() > 0.98
    assert abs(errors[0].sum() / errors[1].sum() - 1) < 1e-3


@pytest.mark.skipif(not native.is_built(), reason="needs the native library")
def test_native_int4_checks_its_argument() -> None:
    with pytest.raises(ValueError, match="`groups` must have rows of 16, 32 or 64 numbers, got 48"):
        quantizing.quantize_groups(np.ones((2, 48), np.float32))
    with pytest.raises(ValueError, match="`groups` must be float32 or bfloat16, got float64"):
        quantizing.quantize_groups(np.ones((2, 64)))


@pytest.mark.skipif(quantized_products.problem() is not None, reason="needs the native library")
@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_has_8_bits(tied: bool, kind: Any, tmp_path: Path) -> None:
    random_checkpoint(tmp_path, LLAMA | {"tie_word_embeddings": tied}, "float32")
    floats = load_model(tmp_path, "float32").model
    for model in (load_model(tmp_path, "float32", quantization=kind).model, quantize_model(floats, kind)):
        head: Any = model.head.embedding if tied else model.head.kernel
        given: Any = floats.head.embedding[...].T if tied else floats.head.kernel[...]
        assert head.scheme == QuantizationScheme.online("int8", 64)
        limit = np.abs(np.asarray(given)).max(0) / 127 / 2 * 1.001
        assert (np.abs(np.asarray(head.dense("float32")) - np.asarray(given)) <= limit).all()
        # The embeddings of an untied model remain floats.
        assert isinstance(model.embed_tokens.embedding, QuantizedWeight) is tied
        tokens = np.arange(96).reshape(4, 24)
        float_model = load_model(tmp_path, "float32").model
        places = {place.path: place.kernel for place in kernel_places(float_model)}
        for place in kernel_places(model):
            value = place.kernel.dense("float32") if isinstance(place.kernel, QuantizedWeight) else None
            if value is not None and place.path in places:
                places[place.path].set_value(value)
            elif value is not None:
                float_model.embed_tokens.embedding.set_value(value.T)
        np.testing.assert_allclose(model(tokens), float_model(tokens), atol=1e-4, rtol=1e-5)
        outline = float_outline(model, "float32")
        shapes, expected = (
            {path: (x.shape, x.dtype) for path, x in nnx.to_flat_state(nnx.state(m, nnx.Param))}
            for m in (outline, floats)
        )
        assert shapes == expected
