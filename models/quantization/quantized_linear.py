"""Quantized weight matrices with 8 or 4 bits per number, and products with them.

All checkpoint formats, and float weights that are quantized while they are loaded, are converted to this
form:

    kernel[i, o] = (values[i, o] - zeros[g(i), o]) * scales[g(i), o] + offsets[g(i), o]

Zero points and offsets are optional, and a matrix has at most one of them. The group g(i) of row i is
i // group_size, or groups[i] if each row is assigned to a group. The device stores only the quantized arrays.
A product dequantizes the matrix as part of its computation, which XLA may fuse, and the float matrix is not
kept.

Letters in shapes: I rows (inputs), O columns (outputs), G groups, and *e the dimension of stacked experts, if
any.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from jax_paged.models.parallel.sharding import DeviceGrid, Split, Units, even, take_columns

# Types that float weights can be quantized to while they are loaded, and the dtypes of their values.
OnlineDtype = Literal["int4", "int8", "fp8"]
ONLINE_DTYPES: dict[OnlineDtype, DTypeLike] = {
    "int4": jnp.uint8,  # two numbers in a value
    "int8": jnp.int8,
    "fp8": jnp.float8_e4m3fn,
}
# Allowed numbers of rows in a group of 4-bit numbers, in the order of preference.
INT4_GROUP_SIZES = 64, 32, 16
# Maximum and minimum number of rows that are dequantized at a time on a CPU.
_BLOCK, _MIN_BLOCK = 128, 16


class QuantizedParam(nnx.Variable[Array]):
    """An array of a quantized weight, for inference only."""


class QuantizedArrays(NamedTuple):
    """The arrays of a quantized weight [*e, I, O].

    Args:
        values: int8 or float8_e4m3fn [*e, I, O]; or uint8 [*e, I / 2, O] with 4-bit numbers of two
            consecutive rows, the first of them in the low bits.
        scales: float32, bfloat16 or float16 [*e, G, O].
        zeros: uint8 or int8 [*e, G, O], the zero points; None if they are 0.
        groups: int32 [*e, I], the group of each row; None if the groups are consecutive rows.
        offsets: [*e, G, O] in the dtype of the scales, added to the numbers of each group; None if they are
            0.
    """

    values: Any
    scales: Any
    zeros: Any = None
    groups: Any = None
    offsets: Any = None


class StoredMatrix(Protocol):
    """Layout of a quantized weight in a checkpoint; implemented in formats.py."""

    def tensors(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """Returns the expected shape and the allowed dtypes of each tensor, by the last part of its key.

        Args:
            rows: Number of rows of the matrix.
            columns: Number of columns of the matrix.
        """
        ...

    def arrays(self, tensors: dict[str, np.ndarray]) -> QuantizedArrays:
        """Returns the arrays of the quantized weight.

        Args:
            tensors: The tensors of the checkpoint, by the last part of their keys.

        Raises:
            ValueError: If the tensors hold values that are not supported.
        """
        ...


@dataclasses.dataclass(frozen=True)
class QuantizationScheme:
    """Layout of a quantized weight on the device, and its origin.

    Args:
        value_dtype: Name of the dtype of the values. In "uint8", each value holds two 4-bit numbers.
        group_size: Number of rows in a group.
        source: The layout in the checkpoint, or the type that float weights are quantized to.
        scale_dtype: Name of the dtype of the scales and offsets.
        has_zeros: Whether there are zero points.
        has_groups: Whether each row is assigned to a group by `QuantizedArrays.groups`.
        has_offsets: Whether there are offsets.
    """

    value_dtype: str
    group_size: int
    source: StoredMatrix | OnlineDtype
    scale_dtype: str = "float32"
    has_zeros: bool = False
    has_groups: bool = False
    has_offsets: bool = False

    @classmethod
    def online(cls, target: OnlineDtype, rows: int) -> "QuantizationScheme":
        """Returns the scheme of float weights that are quantized while they are loaded; see online.py.

        Args:
            target: The type to quantize to. "int4" becomes "int8" if the rows cannot be divided into groups.
            rows: Number of rows of the matrix.
        """
        if target != "int4":
            return cls(jnp.dtype(ONLINE_DTYPES[target]).name, rows, target)
        group_size = next((n for n in INT4_GROUP_SIZES if rows % n == 0), None)
        if group_size is None:
            return cls.online("int8", rows)
        return cls("uint8", group_size, target, "bfloat16", has_offsets=True)

    def shapes(self, shape: tuple[int, ...]) -> QuantizedArrays:
        """Returns the shapes and dtypes of the arrays of a quantized weight, as jax.ShapeDtypeStruct.

        Args:
            shape: Shape of the matrix, [*e, I, O].
        """
        *stack, rows, columns = shape
        num_values = rows // 2 if self.value_dtype == "uint8" else rows
        by_group = *stack, -(-rows // self.group_size), columns
        zeros = jnp.uint8 if self.value_dtype == "uint8" else jnp.int8
        scales = jax.ShapeDtypeStruct(by_group, jnp.dtype(self.scale_dtype))
        return QuantizedArrays(
            jax.ShapeDtypeStruct((*stack, num_values, columns), jnp.dtype(self.value_dtype)),
            scales,
            jax.ShapeDtypeStruct(by_group, zeros) if self.has_zeros else None,
            jax.ShapeDtypeStruct((*stack, rows), jnp.int32) if self.has_groups else None,
            scales if self.has_offsets else None,
        )

    def splits(self, shape: tuple[int, ...], split: Split) -> QuantizedArrays:
        """Returns how the arrays of a quantized weight are divided among devices.

        Args:
            shape: Shape of the matrix, [*e, I, O].
            split: How the matrix is divided among devices.
        """
        *stack, rows, columns = split
        num_rows = shape[-2]
        is_whole = self.has_groups or num_rows <= self.group_size
        by_group = *stack, None if is_whole else _grouped_units(rows, self.group_size), columns
        values = *stack, _grouped_units(rows, 2 if self.value_dtype == "uint8" else 1), columns
        return QuantizedArrays(values, by_group, by_group, (*stack, rows), by_group)


class QuantizedWeight(nnx.Module):
    """A quantized weight matrix [*e, I, O]: its arrays, or shapes in their place.

    Args:
        scheme: The layout of the arrays.
        shape: Shape of the matrix.
        split: How the matrix is divided among devices.
        arrays: The arrays; None for shapes in their place.
    """

    def __init__(
        self,
        scheme: QuantizationScheme,
        shape: tuple[int, ...],
        split: Split,
        arrays: QuantizedArrays | None = None,
    ) -> None:
        self.scheme, self.shape, self.split = scheme, shape, split
        arrays = scheme.shapes(shape) if arrays is None else arrays
        made = [
            None if x is None else QuantizedParam(x, split=s)
            for x, s in zip(arrays, scheme.splits(shape, split), strict=True)
        ]
        self.values, self.scales, self.zeros, self.groups, self.offsets = made

    @property
    def size(self) -> int:
        """The number of elements of the matrix."""
        return math.prod(self.shape)

    @property
    def arrays(self) -> QuantizedArrays:
        """The arrays."""
        return QuantizedArrays(*(None if v is None else v[...] for v in self._variables))

    @property
    def stack(self) -> "KernelStack":
        """The arrays of stacked experts, for use in a forward pass."""
        return KernelStack(self.arrays, self.scheme.group_size)

    @property
    def splits(self) -> QuantizedArrays:
        """The split of each array; None for arrays that the weight does not have."""
        return QuantizedArrays(*(None if v is None else v.get_metadata()["split"] for v in self._variables))

    @property
    def _variables(self) -> tuple[QuantizedParam | None, ...]:
        return self.values, self.scales, self.zeros, self.groups, self.offsets

    def to_devices(self, arrays: QuantizedArrays, grid: DeviceGrid | None) -> dict[str, Array]:
        """Returns arrays by name after copying them to devices. Each device receives its own part.

        Args:
            arrays: The arrays in host memory.
            grid: The devices that share the weight; None for the default device.
        """
        found = {}
        for name, part, split in zip(QuantizedArrays._fields, arrays, self.splits, strict=True):
            if split is None:
                continue
            if grid is None or grid.num_devices == 1:
                # Never alias the mapped file, because it may change.
                found[name] = jax.device_put(part, grid and grid.devices[0], may_alias=False)
                continue
            own = take_columns(np.asarray(part), grid.columns(split))
            found[name] = jax.make_array_from_callback(own.shape, grid.sharding(split), own.__getitem__)
        return found

    def dense(self, dtype: DTypeLike) -> Float[Array, "*e i o"]:
        """Returns the dequantized matrix, computed in float32 and rounded once.

        Args:
            dtype: The dtype of the result.

        Returns:
            [*e, I, O].
        """
        return dense(self.arrays, self.scheme.group_size, dtype)

    def product(
        self, x: Float[Array, "*t i"], dtype: DTypeLike, *, is_divided: bool = False
    ) -> Float[Array, "*t o"]:
        """Returns x @ kernel.

        Args:
            x: float [*T, I].
            dtype: The dtype of the result.
            is_divided: Whether the rows of the matrix are divided among devices.

        Returns:
            [*T, O].
        """
        return multiply(x, self.arrays, self.scheme.group_size, dtype, is_divided=is_divided)


def multiply(
    x: Float[Array, "*t i"],
    arrays: QuantizedArrays,
    group_size: int,
    dtype: DTypeLike,
    *,
    is_divided: bool = False,
) -> Float[Array, "*t o"]:
    """Returns x @ kernel for a single quantized matrix.

    On a CPU, the matrix is dequantized a few rows at a time if its groups and devices allow it. Otherwise it
    is dequantized as a whole.

    Args:
        x: float [*T, I].
        arrays: The arrays of the matrix, without a dimension for experts.
        group_size: Number of rows in a group.
        dtype: The dtype of the result.
        is_divided: Whether the rows of the matrix are divided among devices. In this case the arrays of
            `arrays` span all devices.

    Returns:
        [*T, O].
    """
    rows = x.shape[-1]
    block = math.gcd(rows, _BLOCK)
    fits = group_size >= rows or (rows % group_size == 0 and 0 in (block % group_size, group_size % block))
    if is_divided or block < _MIN_BLOCK or not (fits or arrays.groups is not None):
        return _multiply_whole(x, arrays, group_size, dtype)
    return jax.lax.platform_dependent(
        x,
        arrays,
        cpu=lambda x, arrays: _multiply_blocks(x, arrays, group_size, block).astype(dtype),
        default=lambda x, arrays: _multiply_whole(x, arrays, group_size, dtype),
    )


def _multiply_whole(x: Array, arrays: QuantizedArrays, group_size: int, dtype: DTypeLike) -> Array:
    """Dequantizes the whole matrix. XLA may fuse this with the product, but does not do so on a CPU."""
    # Without the barrier, XLA might dequantize the matrices of all layers, or of all iterations of multi-step
    # decoding, before their products.
    values, _ = jax.lax.optimization_barrier((arrays.values, x))
    arrays = arrays._replace(values=values)
    others = arrays.zeros, arrays.groups, arrays.offsets
    if all(x is None for x in others) and len(arrays.scales) == 1 and arrays.values.dtype != jnp.uint8:
        # 8-bit values are exact in every float dtype, so the scale of a column can be applied to the result.
        y = jnp.matmul(x, arrays.values.astype(x.dtype), preferred_element_type=jnp.float32)
        return (y * arrays.scales[0].astype(jnp.float32)).astype(dtype)
    kernel = dense(arrays, group_size, x.dtype)
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32).astype(dtype)


def _multiply_blocks(x: Array, arrays: QuantizedArrays, group_size: int, block: int) -> Float[Array, "*t o"]:
    """Dequantizes `block` rows at a time, which fit into a CPU core's cache, and adds up the products."""
    *leading, rows = x.shape
    x = x.reshape(-1, rows // block, block).swapaxes(0, 1).astype(jnp.float32)
    num_values = block // 2 if arrays.values.dtype == jnp.uint8 else block
    is_fp8 = arrays.values.dtype == jnp.float8_e4m3fn
    # Sliced as bytes, because XLA would convert the whole fp8 array in order to slice it.
    all_values = jax.lax.bitcast_convert_type(arrays.values, jnp.uint8) if is_fp8 else arrays.values

    def add_block(i: Array, y: Array) -> Array:
        def cut(part: Any, size: int, first: Array) -> Any:
            return None if part is None else jax.lax.dynamic_slice_in_dim(part, first, size)

        values, groups = cut(all_values, num_values, i * num_values), cut(arrays.groups, block, i * block)
        by_group = arrays.scales, arrays.zeros, arrays.offsets
        if groups is None:
            num, first = max(1, block // group_size), i * block // group_size
            by_group = tuple(cut(part, num, first) for part in by_group)
        scales, zeros, offsets = by_group
        values = _from_fp8(values) if is_fp8 else values
        own = QuantizedArrays(values, scales, zeros, groups, offsets)
        return y + x[i] @ dense(own, min(group_size, block), jnp.float32)

    y = jnp.zeros((x.shape[1], arrays.values.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, len(x), add_block, y).reshape(*leading, -1)


def _from_fp8(values: UInt8[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns bytes of float8_e4m3fn as float32. On a CPU this is many times faster than XLA's conversion."""
    bits = values.astype(jnp.int32)
    magnitude = bits & 127
    # The number has three fraction bits, and an exponent that is 120 less than the exponent in float32.
    # Subnormal numbers are multiples of 2^-9.
    normal = jax.lax.bitcast_convert_type((magnitude << 20) + (120 << 23), jnp.float32)
    number = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * 2.0**-9, normal)
    number = jnp.where(magnitude == 127, jnp.nan, number)
    return jnp.where(bits > 127, -number, number)


def select_expert(arrays: QuantizedArrays, index: Int[Array, ""]) -> QuantizedArrays:
    """Returns the arrays of one of several stacked matrices.

    Args:
        arrays: The arrays of all matrices.
        index: int32 [], index of the matrix.
    """

    def take(part: Array) -> Array:
        if part.dtype != jnp.float8_e4m3fn:
            return part[index]
        taken = jax.lax.bitcast_convert_type(part, jnp.uint8)[index]
        return jax.lax.bitcast_convert_type(taken, part.dtype)

    return jax.tree.map(take, arrays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KernelStack:
    """The quantized weights of stacked experts, for use in a forward pass.

    Args:
        arrays: The arrays of all experts.
        group_size: Number of rows in a group.
    """

    arrays: QuantizedArrays
    group_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_columns(self) -> int:
        """The number of columns of each matrix."""
        return self.arrays.values.shape[-1]

    def product(self, x: Float[Array, "b i"], index: Int[Array, ""]) -> Float[Array, "b o"]:
        """Returns x @ kernel for one of the experts.

        Args:
            x: float [B, I].
            index: int32 [], index of the expert.

        Returns:
            [B, O] in the dtype of x.
        """
        return multiply(x, select_expert(self.arrays, index), self.group_size, x.dtype)


def dense(arrays: QuantizedArrays, group_size: int, dtype: DTypeLike) -> Float[Array, "*e i o"]:
    """Returns the dequantized matrix, computed in float32 and rounded once.

    Args:
        arrays: The arrays of the matrix.
        group_size: Number of rows in a group.
        dtype: The dtype of the result.

    Returns:
        [*e, I, O].
    """
    if arrays.values.ndim > 2:
        return jax.vmap(lambda one: dense(one, group_size, dtype))(arrays)
    values = arrays.values
    if values.dtype == jnp.uint8:
        values = jnp.stack([values & 15, values >> 4], axis=1).reshape(-1, values.shape[-1])

    def of_rows(x: Array) -> Array:
        x = x.astype(jnp.float32)
        if arrays.groups is not None:
            return x[arrays.groups]
        return x if x.shape[0] == 1 else jnp.repeat(x, group_size, axis=0)[: values.shape[0]]

    kernel = values.astype(jnp.float32)
    if arrays.zeros is not None:
        kernel = kernel - of_rows(arrays.zeros)
    kernel = kernel * of_rows(arrays.scales)
    if arrays.offsets is not None:
        kernel = kernel + of_rows(arrays.offsets)
    return kernel.astype(dtype)


def pack_pairs(values: Int[np.ndarray, "i o"]) -> Int[np.ndarray, "h o"]:
    """Returns 4-bit numbers packed as in `QuantizedArrays.values`.

    Args:
        values: int [I, O], numbers in [0, 15].

    Returns:
        uint8 [I / 2, O].
    """
    return (values[::2] | values[1::2] << 4).astype(np.uint8)


def _grouped_units(rows: tuple[Units, ...] | None, step: int) -> tuple[Units, ...] | None:
    """Returns the units of a dimension that has one entry for every `step` rows."""
    if rows is None or step == 1:
        return rows
    (units,) = rows
    assert units.division == "even", "rows of a quantized matrix must be a single list of even units"
    num = units.num * units.size
    # If the last group is shorter than the others, the groups are one unit, which cannot be divided.
    return even(num // step) if num % step == 0 else even(1, -(-num // step))
