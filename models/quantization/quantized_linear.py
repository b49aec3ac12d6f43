"""Kernels that take a byte or half a byte per number, with scales, and products with them.

Every format of a checkpoint, and what is made of float weights, becomes one of these:

    kernel[i, o] = (values[i, o] - zeros[g(i), o]) * scales[g(i), o]

A group g is `group_size` rows, or each row names its own. The device holds the small form only; what a
product needs of the kernel is computed within it, so that XLA may fuse the two, and is forgotten.
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

from jax_paged.models.parallel.sharding import DeviceGrid, Split, Units, even, taken

# What kernels become on the fly: a byte per number, and a scale for each column.
Kind = Literal["int8", "fp8"]
KIND_DTYPES: dict[Kind, DTypeLike] = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
_LARGEST = {"int8": 127.0, "fp8": 448.0}
# Rows of a kernel that a CPU makes floats of at a time.
_BLOCK, _MIN_BLOCK = 128, 16
# Columns of a kernel that are quantized at a time.
_COLUMNS = 256


class QuantizedParam(nnx.Variable[Array]):
    """An array of a quantized weight, to serve with and not to train."""


class Parts(NamedTuple):
    """The arrays of a kernel [*e, I, O]; those of several experts are stacked.

    Args:
        values: int8 or float8_e4m3fn [*e, I, O]; or uint8 [*e, I / 2, O]: four bits of each of two rows, the
            low ones being the first row's.
        scales: [*e, G, O], of a float type.
        zeros: uint8 or int8 [*e, G, O], what stands for 0; None if 0 does.
        groups: int32 [*e, I], the group of each row; None if they lie one after the other.
    """

    values: Any
    scales: Any
    zeros: Any = None
    groups: Any = None


class StoredKernel(Protocol):
    """How a checkpoint holds a quantized weight; see quantized_formats.py."""

    def tensors(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """Returns the shapes and the types that its tensors have, by the ends of their keys."""
        ...

    def parts(self, tensors: dict[str, np.ndarray]) -> Parts:
        """Returns what its tensors mean."""
        ...


@dataclasses.dataclass(frozen=True)
class QuantizationScheme:
    """Layout of a quantized weight.

    Args:
        values: Type of the values; "uint8" is two numbers of four bits in each.
        group_size: Rows of a group.
        scales: Type of the scales.
        has_zeros: Whether something else than 0 stands for 0.
        has_groups: Whether each row names its group.
        source: How the checkpoint holds it, or what a float kernel becomes on the fly.
    """

    values: str
    group_size: int
    source: StoredKernel | Kind
    scales: str = "float32"
    has_zeros: bool = False
    has_groups: bool = False

    @classmethod
    def of_kind(cls, kind: Kind, rows: int) -> "QuantizationScheme":
        """Returns what kernels with so many rows become on the fly."""
        return cls(jnp.dtype(KIND_DTYPES[kind]).name, rows, kind)

    def shapes(self, shape: tuple[int, ...]) -> Parts:
        """Returns the shapes and types of the parts of a kernel of a shape [*e, I, O]."""
        *stack, rows, columns = shape
        held = rows // 2 if self.values == "uint8" else rows
        by_group = *stack, -(-rows // self.group_size), columns
        zeros = jnp.uint8 if self.values == "uint8" else jnp.int8
        return Parts(
            jax.ShapeDtypeStruct((*stack, held, columns), jnp.dtype(self.values)),
            jax.ShapeDtypeStruct(by_group, jnp.dtype(self.scales)),
            jax.ShapeDtypeStruct(by_group, zeros) if self.has_zeros else None,
            jax.ShapeDtypeStruct((*stack, rows), jnp.int32) if self.has_groups else None,
        )

    def splits(self, shape: tuple[int, ...], split: Split) -> Parts:
        """Returns how the parts are divided among devices, of a kernel that is divided like this."""
        *stack, rows, columns = split
        num_rows = shape[-2]
        is_whole = self.has_groups or num_rows <= self.group_size
        by_group = *stack, None if is_whole else _in_steps(rows, self.group_size), columns
        values = *stack, _in_steps(rows, 2 if self.values == "uint8" else 1), columns
        return Parts(values, by_group, by_group, (*stack, rows))


class QuantizedWeight(nnx.Module):
    """A kernel [*e, I, O] in quantized form: arrays, or shapes in their places.

    Args:
        form: What it is made of.
        shape: Of the kernel.
        split: How the kernel is divided among devices.
        parts: The arrays; None for their shapes.
    """

    def __init__(
        self, form: QuantizationScheme, shape: tuple[int, ...], split: Split, parts: Parts | None = None
    ) -> None:
        self.form, self.shape, self.split = form, shape, split
        parts = form.shapes(shape) if parts is None else parts
        made = [
            None if x is None else QuantizedParam(x, split=s)
            for x, s in zip(parts, form.splits(shape, split), strict=True)
        ]
        self.values, self.scales, self.zeros, self.groups = made

    @property
    def size(self) -> int:
        """How many numbers the kernel has."""
        return math.prod(self.shape)

    @property
    def parts(self) -> Parts:
        """Its arrays."""
        variables = self.values, self.scales, self.zeros, self.groups
        return Parts(*(None if v is None else v[...] for v in variables))

    @property
    def stack(self) -> "KernelStack":
        """Its arrays, of a kernel of several experts."""
        return KernelStack(self.parts, self.form.group_size)

    @property
    def part_splits(self) -> Parts:
        """How its arrays are divided among devices; None of those that it has not."""
        variables = self.values, self.scales, self.zeros, self.groups
        return Parts(*(None if v is None else v.get_metadata()["split"] for v in variables))

    def placed(self, parts: Parts, grid: DeviceGrid | None) -> dict[str, Array]:
        """Returns parts by their names, on the devices of a grid; each device gets its own."""
        found = {}
        for name, part, split in zip(Parts._fields, parts, self.part_splits, strict=True):
            if split is None:
                continue
            if grid is None or grid.num_devices == 1:
                # Never an alias: the file may change.
                found[name] = jax.device_put(part, grid and grid.devices[0], may_alias=False)
                continue
            own = taken(np.asarray(part), grid.columns(split))
            found[name] = jax.make_array_from_callback(own.shape, grid.sharding(split), own.__getitem__)
        return found

    def dense(self, dtype: DTypeLike) -> Float[Array, "*e i o"]:
        """Returns the kernel, computed in float32 and rounded once."""
        return dense(self.parts, self.form.group_size, dtype)

    def product(
        self, x: Float[Array, "*t i"], dtype: DTypeLike, *, is_divided: bool = False
    ) -> Float[Array, "*t o"]:
        """Returns x @ kernel of a type; `is_divided` is whether several devices have some rows each."""
        return multiply(x, self.parts, self.form.group_size, dtype, is_divided=is_divided)


def multiply(
    x: Float[Array, "*t i"], parts: Parts, group_size: int, dtype: DTypeLike, *, is_divided: bool = False
) -> Float[Array, "*t o"]:
    """Returns x @ kernel of a type, of a single kernel in parts.

    Args:
        x: Rows.
        parts: Of the kernel.
        group_size: Rows of a group.
        dtype: Of the result.
        is_divided: Whether several devices have some of the kernel's rows each, in one array.
    """
    rows = x.shape[-1]
    block = math.gcd(rows, _BLOCK)
    fits = group_size >= rows or (rows % group_size == 0 and 0 in (block % group_size, group_size % block))
    if is_divided or block < _MIN_BLOCK or not (fits or parts.groups is not None):
        return _multiply_whole(x, parts, group_size, dtype)
    return jax.lax.platform_dependent(
        x,
        parts,
        cpu=lambda x, parts: _multiply_blocks(x, parts, group_size, block).astype(dtype),
        default=lambda x, parts: _multiply_whole(x, parts, group_size, dtype),
    )


def _multiply_whole(x: Array, parts: Parts, group_size: int, dtype: DTypeLike) -> Array:
    """Leaves it to XLA to fuse the kernel with the product; on a CPU it does not."""
    # Else XLA might compute the kernels of all layers, or of all steps of a burst, ahead of their products.
    values, _ = jax.lax.optimization_barrier((parts.values, x))
    parts = parts._replace(values=values)
    if parts.zeros is None and parts.groups is None and len(parts.scales) == 1:
        # Values of a byte are exact in every float type, and the scale of a column can wait.
        y = jnp.matmul(x, parts.values.astype(x.dtype), preferred_element_type=jnp.float32)
        return (y * parts.scales[0].astype(jnp.float32)).astype(dtype)
    kernel = dense(parts, group_size, x.dtype)
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32).astype(dtype)


def _multiply_blocks(x: Array, parts: Parts, group_size: int, block: int) -> Float[Array, "*t o"]:
    """Makes floats of as many rows of the kernel at a time as the cache of a core holds, and adds up."""
    *leading, rows = x.shape
    x = x.reshape(-1, rows // block, block).swapaxes(0, 1).astype(jnp.float32)
    held = block // 2 if parts.values.dtype == jnp.uint8 else block
    is_fp8 = parts.values.dtype == jnp.float8_e4m3fn
    # As bytes: XLA would convert all of them to cut some out.
    all_values = jax.lax.bitcast_convert_type(parts.values, jnp.uint8) if is_fp8 else parts.values

    def add_block(i: Array, y: Array) -> Array:
        def cut(part: Any, size: int, first: Array) -> Any:
            return None if part is None else jax.lax.dynamic_slice_in_dim(part, first, size)

        values, groups = cut(all_values, held, i * held), cut(parts.groups, block, i * block)
        scales, zeros = parts.scales, parts.zeros
        if groups is None:
            num, first = max(1, block // group_size), i * block // group_size
            scales, zeros = cut(scales, num, first), cut(zeros, num, first)
        values = _from_fp8(values) if is_fp8 else values
        own = Parts(values, scales, zeros, groups)
        return y + x[i] @ dense(own, min(group_size, block), jnp.float32)

    y = jnp.zeros((x.shape[1], parts.values.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, len(x), add_block, y).reshape(*leading, -1)


def _from_fp8(values: UInt8[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns the bytes of float8_e4m3fn as float32; XLA's own conversion is many times slower on a CPU."""
    held = values.astype(jnp.int32)
    size = held & 127
    # Three bits of the fraction, and an exponent that is 120 less than float32's; below it, steps of 2^-9.
    usual = jax.lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    found = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, usual)
    found = jnp.where(size == 127, jnp.nan, found)
    return jnp.where(held > 127, -found, found)


def one_of(parts: Parts, index: Int[Array, ""]) -> Parts:
    """Returns the parts of one of several kernels."""

    def take(part: Array) -> Array:
        if part.dtype != jnp.float8_e4m3fn:
            return part[index]
        taken = jax.lax.bitcast_convert_type(part, jnp.uint8)[index]
        return jax.lax.bitcast_convert_type(taken, part.dtype)

    return jax.tree.map(take, parts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KernelStack:
    """The quantized weights of several experts, in a pass.

    Args:
        parts: Of all of them.
        group_size: Rows of a group.
    """

    parts: Parts
    group_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_columns(self) -> int:
        """Of each kernel."""
        return self.parts.values.shape[-1]

    def product(self, x: Float[Array, "b i"], index: Int[Array, ""]) -> Float[Array, "b o"]:
        """Returns x @ one of the kernels, of the type of x."""
        return multiply(x, one_of(self.parts, index), self.group_size, x.dtype)


def dense(parts: Parts, group_size: int, dtype: DTypeLike) -> Float[Array, "*e i o"]:
    """Returns the kernel of some parts, computed in float32 and rounded once."""
    if parts.values.ndim > 2:
        return jax.vmap(lambda one: dense(one, group_size, dtype))(parts)
    values = parts.values
    if values.dtype == jnp.uint8:
        values = jnp.stack([values & 15, values >> 4], axis=1).reshape(-1, values.shape[-1])

    def of_rows(x: Array) -> Array:
        x = x.astype(jnp.float32)
        if parts.groups is not None:
            return x[parts.groups]
        return x if x.shape[0] == 1 else jnp.repeat(x, group_size, axis=0)[: values.shape[0]]

    kernel = values.astype(jnp.float32)
    if parts.zeros is not None:
        kernel = kernel - of_rows(parts.zeros)
    return (kernel * of_rows(parts.scales)).astype(dtype)


def quantize(kernel: Float[Array, "*e i o"], kind: Kind) -> Parts:
    """Returns a kernel with a byte per number, and a float32 scale for each column of each expert.

    Args:
        kernel: float32 or bfloat16.
        kind: "int8" rounds to 255 steps from the largest magnitude of the column down to its negative; "fp8"
            to float8_e4m3fn, whose largest number is the largest magnitude.
    """
    return Parts(*_quantize(kernel, kind))


def quantize_file(kernel: Float[np.ndarray, "*e i o"], dtype: DTypeLike, kind: Kind) -> Parts:
    """Returns what `quantize` does, in host memory, of a mapped file, a few columns at a time."""
    *stack, rows, columns = kernel.shape
    values = np.empty((*stack, rows, columns), KIND_DTYPES[kind])
    scales = np.empty((*stack, 1, columns), np.float32)
    for i in np.ndindex(*stack):
        for first in range(0, columns, _COLUMNS):
            part = *i, slice(None), slice(first, first + _COLUMNS)
            values[part], scales[part] = _quantize(jnp.asarray(kernel[part].astype(dtype)), kind)
    return Parts(values, scales)


def _quantize(kernel: Array, kind: Kind) -> tuple[Array, Array]:
    kernel = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(kernel), axis=-2, keepdims=True)
    # A product, as XLA may make one of a quotient by a constant, and round it in another way.
    scales = jnp.where(largest > 0, largest, 1) * (1 / _LARGEST[kind])
    values = jnp.clip(kernel / scales, -_LARGEST[kind], _LARGEST[kind])
    values = jnp.round(values) if kind == "int8" else values
    return values.astype(KIND_DTYPES[kind]), scales


_quantize = jax.jit(_quantize, static_argnums=1)


def pairs(values: Int[np.ndarray, "i o"]) -> Int[np.ndarray, "h o"]:
    """Returns numbers of four bits as `Parts.values` holds them."""
    return (values[::2] | values[1::2] << 4).astype(np.uint8)


def _in_steps(rows: tuple[Units, ...] | None, step: int) -> tuple[Units, ...] | None:
    """Returns the units of what there is one of for every so many rows."""
    if rows is None or step == 1:
        return rows
    (units,) = rows
    assert units.kind == "even", "the rows of every family are one list of even units"
    num = units.num * units.size
    # A group that is cut short can't be divided.
    return even(num // step) if num % step == 0 else even(1, -(-num // step))
