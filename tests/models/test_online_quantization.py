"""Weights with offsets, and float weights that are quantized while they are loaded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.models.quantization.quantized_linear import (
    QuantizationScheme,
    QuantizedArrays,
    QuantizedWeight,
    dense,
    multiply,
    pack_pairs,
)


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
