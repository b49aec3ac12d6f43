"""The block types of GGUF files beside the gguf package, on random blocks of random shapes."""

import dataclasses

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from helpers.gguf_files import QUANTIZABLE, random_blocks

from jax_paged.models.loading.gguf import block_types
from jax_paged.models.loading.gguf.block_types import BLOCK_TYPES, BlockType, GgufMatrix, to_floats
from jax_paged.models.quantization.quantized_linear import dense

SMALLEST = np.finfo(np.float32).tiny


def check_shape(name: str, kind: BlockType, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """Compares the values of random blocks [*shape, bytes] with those of the package."""
    blocks = random_blocks(name, shape, rng)
    type_of = GGMLQuantizationType[name]
    want = gguf.quants.dequantize(blocks.reshape(*shape[:-1], -1), type_of)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(kind.floats(blocks), want)
        arrays = kind.arrays(blocks)
    scheme = GgufMatrix(name).scheme()
    rows = shape[-1] * GGML_QUANT_SIZES[type_of][0]
    expected = scheme.shapes((*shape[:-2], rows, shape[-2]))
    for part, shaped in zip(arrays, expected, strict=True):
        assert (part is None) == (shaped is None)
        assert part is None or (part.shape, part.dtype) == (shaped.shape, shaped.dtype)
    # NumPy in float64: the product of a number and its scale is exact, so only the sum is rounded.
    numbers = arrays.values.astype(np.float64)
    if kind.is_4bit:
        pairs = arrays.values[..., None, :] >> np.array([0, 4], np.uint8)[:, None] & 15
        numbers = pairs.reshape(*shape[:-2], rows, -1).astype(np.float64)

    def of_rows(part: np.ndarray | None) -> np.ndarray | float:
        return 0.0 if part is None else np.repeat(part.astype(np.float64), kind.group_size, axis=-2)

    value = (numbers - of_rows(arrays.zeros)) * of_rows(arrays.scales) + of_rows(arrays.offsets)
    np.testing.assert_array_equal(value.astype(np.float32), want.swapaxes(-1, -2))


def random_shape(rng: np.random.Generator) -> tuple[int, ...]:
    stack = [int(n) for n in rng.integers(1, 4, rng.integers(0, 2))]
    return *stack, int(rng.integers(1, 7)), int(rng.integers(1, 4))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_values_of_random_shapes(name: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        check_shape(name, BLOCK_TYPES[name], random_shape(rng), rng)


@pytest.mark.thorough
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_values_of_many_random_shapes(name: str) -> None:
    rng = np.random.default_rng(1)
    for _ in range(10_000):
        check_shape(name, BLOCK_TYPES[name], random_shape(rng), rng)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_values_on_the_device(name: str) -> None:
    kind, shape = BLOCK_TYPES[name], (3, 40, 2)
    blocks = random_blocks(name, shape, np.random.default_rng(2))
    want = gguf.quants.dequantize(blocks.reshape(3, 40, -1), GGMLQuantizationType[name]).swapaxes(-1, -2)
    arrays = kind.arrays(blocks)
    found = np.asarray(dense(arrays, kind.group_size, jnp.float32))
    # The product is exact, and the sum is rounded once. XLA may round subnormal numbers to zero.
    np.testing.assert_allclose(found, want, rtol=0, atol=SMALLEST)
    found = to_floats(blocks, name, "bfloat16").swapaxes(-1, -2)
    np.testing.assert_array_equal(found, want.astype(jnp.bfloat16))


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_values_of_quantized_numbers(name: str) -> None:
    rng, type_of = np.random.default_rng(3), GGMLQuantizationType[name]
    values = rng.normal(size=(16, 64)).astype(np.float32)
    data = gguf.quants.quantize(values, type_of)
    blocks = data.reshape(16, 2, -1)
    found = BLOCK_TYPES[name].floats(blocks)
    np.testing.assert_array_equal(found, gguf.quants.dequantize(data, type_of))
    # The numbers of a group cover its range, of at most 8 for normal numbers, in 15 steps or more.
    assert np.abs(found - values).max() < 8 / 15


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_every_bit_of_a_block_counts(name: str) -> None:
    kind, type_of = BLOCK_TYPES[name], GGMLQuantizationType[name]
    block = random_blocks(name, (1, 1), np.random.default_rng(4))
    base, num_changed = gguf.quants.dequantize(block.reshape(1, -1), type_of), 0
    for i in range(block.size):
        for bit in range(8):
            changed = block.copy()
            changed[..., i] ^= 1 << bit
            with np.errstate(all="ignore"):
                want = gguf.quants.dequantize(changed.reshape(1, -1), type_of)
                np.testing.assert_array_equal(kind.floats(changed), want)
                num_changed += not np.array_equal(want, base)
    # Changes of the sign of a zero in MXFP4 have no effect.
    assert num_changed > 0.9 * 8 * block.size


@pytest.mark.parametrize(
    ("name", "function", "bug"),
    [
        ("Q4_0", "_nibbles", lambda x: np.concatenate([x >> 4, x & 15], axis=-1)),
        ("Q5_1", "_fifth_bits", lambda x: np.unpackbits(np.ascontiguousarray(x), axis=-1) << 4),
        ("Q4_K", "_k_scales", lambda x: tuple(part[..., ::-1] for part in block_types.__dict__["_right"](x))),
        ("Q5_K", "_nibbles", lambda x: np.stack([x & 15, x >> 4], axis=-1).reshape(*x.shape[:-1], -1)),
        ("Q6_K", "_halves", lambda x, first, num=1: np.ascontiguousarray(x[..., :2]).view(np.float16)),
        ("MXFP4", "_nibbles", lambda x: np.concatenate([x & 7, x >> 4], axis=-1)),
    ],
)
def test_planted_bugs_are_found(
    name: str, function: str, bug: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(block_types.__dict__, "_right", block_types.__dict__[function])
    monkeypatch.setattr(block_types, function, bug)
    with pytest.raises(AssertionError):
        check_shape(name, BLOCK_TYPES[name], (4, 2), np.random.default_rng(5))


@pytest.mark.parametrize(
    ("name", "changes"),
    [("Q4_0", {"zero": 7}), ("Q8_0", {"group_size": 16}), ("Q4_1", {"is_4bit": False})],
)
def test_planted_descriptions_are_found(name: str, changes: dict[str, int]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check_shape(name, dataclasses.replace(BLOCK_TYPES[name], **changes), (4, 2), np.random.default_rng(6))
