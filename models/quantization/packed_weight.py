"""Quantized weight matrices in the packed form of the native CPU backend.

When an engine loads a model on a CPU, it replaces each QuantizedWeight by a PackedWeight; see `pack`. The
products of both are equal up to the rounding of float32 sums.
"""

from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_paged.models.quantization.quantized_linear import (
    QuantizedArrays,
    QuantizedParam,
    QuantizedWeight,
    dense,
)
from jax_paged.pallas_kernels.native import quantized_products
from jax_paged.pallas_kernels.native.quantized_products import Kind, PackedQuantized

_KINDS: dict[str, Kind] = {"uint8": "int4", "int8": "int8", "float8_e4m3fn": "fp8"}


class PackedWeight(nnx.Module):
    """A packed quantized weight matrix [I, O], or those of stacked experts, for inference only.

    Args:
        packed: The matrix, or matrices.
    """

    def __init__(self, packed: PackedQuantized) -> None:
        self.layout = packed.layout
        self.values, self.scales = QuantizedParam(packed.values), QuantizedParam(packed.scales)
        self.offsets = None if packed.offsets is None else QuantizedParam(packed.offsets)
        self.permutation = None if packed.permutation is None else QuantizedParam(packed.permutation)

    @property
    def packed(self) -> PackedQuantized:
        """The matrix, or matrices, for use in a forward pass."""
        offsets = None if self.offsets is None else self.offsets[...]
        permutation = None if self.permutation is None else self.permutation[...]
        return PackedQuantized(self.values[...], self.scales[...], offsets, permutation, self.layout)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the scales."""
        return self.scales[...].dtype

    def product(self, x: Float[Array, "*t i"], dtype: DTypeLike) -> Float[Array, "*t o"]:
        """Returns x @ kernel.

        Args:
            x: float [*T, I].
            dtype: The dtype of the result.

        Returns:
            [*T, O].
        """
        return quantized_products.multiply(x, self.packed, dtype)

    def columns(self, indices: Int[Array, "*n"], dtype: DTypeLike) -> Float[Array, "*n i"]:
        """Returns some columns of the matrix as floats.

        Args:
            indices: int32 [*N], indices of the columns.
            dtype: The dtype of the result.

        Returns:
            [*N, I].
        """
        return quantized_products.columns(self.packed, indices, dtype)


def pack(weights: Sequence[QuantizedWeight]) -> list[tuple[PackedWeight, int]] | None:
    """Returns packed forms of weights: one for all if their layouts are equal, otherwise one for each.

    Args:
        weights: Weights with values, which are not divided among devices. Several weights must not be stacks
            of experts; they are multiplied with the same input.

    Returns:
        The packed weight of each, and the first of its columns in the packed weight. None if a weight cannot
        be packed because its groups are irregular or too small.
    """
    found = [_pack(weight.arrays, weight.scheme.group_size) for weight in weights]
    parts = [part for part in found if part is not None]
    if len(parts) < len(found):
        return None
    keys = {quantized_products.mergeable(part) for part in parts}
    if len(parts) > 1 and len(keys) == 1 and None not in keys:
        whole, starts = quantized_products.merged(parts)
        weight = _placed(whole)
        return [(weight, start) for start in starts]
    return [(_placed(part), 0) for part in parts]


def _placed(packed: PackedQuantized) -> PackedWeight:
    return PackedWeight(jax.tree.map(jax.device_put, packed))


def _pack(arrays: QuantizedArrays, group_size: int) -> PackedQuantized | None:
    """Returns a packed weight in host memory; None if the weight cannot be packed."""
    host = jax.tree.map(np.asarray, arrays)
    kind = _KINDS[host.values.dtype.name]
    rows = host.values.shape[-2] * (2 if kind == "int4" else 1)
    if group_size < rows and group_size % 8:
        return None
    order = None
    if host.groups is not None:
        order = np.argsort(host.groups, axis=-1, kind="stable").astype(np.int32)
        in_order = np.take_along_axis(host.groups, order, axis=-1)
        if (in_order != np.arange(rows) // group_size).any():
            return None
    offsets = host.offsets if host.zeros is None else host.zeros
    return quantized_products.pack(
        host.values, host.scales, kind=kind, group_size=group_size, offsets=offsets, permutation=order
    )


def float_columns(weight: QuantizedWeight, indices: Int[Array, "*n"], dtype: DTypeLike) -> Array:
    """Returns some columns of a quantized matrix as floats, without packing it.

    Args:
        weight: The matrix, [I, O].
        indices: int32 [*N], indices of the columns.
        dtype: The dtype of the result.

    Returns:
        [*N, I].
    """
    flat = indices.reshape(-1)
    taken = {
        name: part if part is None or name == "groups" else part[:, flat]
        for name, part in weight.arrays._asdict().items()
    }
    kernel = dense(QuantizedArrays(**taken), weight.scheme.group_size, dtype)
    return kernel.T.reshape(*indices.shape, -1)
