"""Matrix products with quantized weight matrices on a CPU: quantized_products.cc.

A "kernel" in this module is a weight matrix [rows, columns] with 4 or 8 bits per number:

    kernel[i, o] = numbers[i, o] * scales[g(i), o] + offsets[g(i), o]
    kernel[i, o] = (numbers[i, o] - zeros[g(i), o]) * scales[g(i), o]

The group g(i) of row i is i // group_size. `pack` arranges the numbers in panels of 16 columns (see
quantized_products.h), once when a model is loaded. For up to four rows, numbers are
decoded in registers. For more rows, blocks of the kernel are decoded to float32 once for up to 256 rows.

Activations are not quantized. Sums are float32, and their order does not depend on the number of rows: the
result for a row is the same, bit for bit, in every batch and for every number of threads.
"""

import ctypes
import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from jax_paged.pallas_kernels import native

Kind = Literal["int4", "int8", "fp8"]
# Activations that `multiply_gated` has.
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh")
# Number of columns in a panel.
PANEL = 16
# Number of bytes after the last panel; see kReadAhead.
_READ_AHEAD = 64
# Numbers of floats in a vector, widest first. The last is the baseline, which every processor has.
_WIDTHS = (16, 8, 4)

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """The shape and type of a packed kernel.

    Args:
        kind: The type of the numbers.
        rows: Number of rows.
        columns: Number of columns.
        group_size: Number of packed rows in a group. The last group may have fewer.
    """

    kind: Kind
    rows: int
    columns: int
    group_size: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedQuantized:
    """A packed kernel, or several of the same shape, for experts.

    Args:
        values: uint8 [*e, bytes], the numbers in panels.
        scales: float32, bfloat16 or float16 [*e, panels, groups, 16].
        offsets: The offsets as scales, or the zero points as uint8 or int8 of the same shape; None if they
            are 0.
        permutation: int32 [*e, rows], the row of the kernel for each packed row; None if they are in order.
        layout: The shape and type.
    """

    values: Any
    scales: Any
    offsets: Any
    permutation: Any
    layout: PackedLayout = dataclasses.field(metadata={"static": True})


def problem() -> str | None:
    """Returns the reason why packed kernels cannot be used; None if they can.

    The reason is a clause without a full stop.
    """
    platform = jax.devices()[0].platform
    if platform != "cpu":
        return f"they need a CPU, and the device is a {platform}"
    if not native.is_built():
        return f"the native backend can't be used: {native.problem()}"
    return None


def pack(
    values: np.ndarray,
    scales: np.ndarray,
    *,
    kind: Kind,
    group_size: int,
    offsets: np.ndarray | None = None,
    permutation: Int[np.ndarray, "*e i"] | None = None,
) -> PackedQuantized:
    """Returns a packed kernel, or a stack of them, in host memory.

    Args:
        values: The numbers: int8 or float8_e4m3fn [*e, I, O]; or for 4 bits uint8 [*e, I / 2, O], with two
            consecutive rows in a byte, the first of them in the low bits.
        scales: float32, bfloat16 or float16 [*e, G, O].
        kind: The type of the numbers.
        group_size: Number of rows in a group, a multiple of 8; or at least I for a single group.
        offsets: The offsets as scales, or the zero points as uint8 or int8 [*e, G, O]; None if they are 0.
        permutation: int32 [*e, I], the row for each packed row; None if they are in order. Groups consist of
            consecutive packed rows.

    Raises:
        ValueError: If sizes do not match.
    """
    *stack, num, columns = values.shape
    rows = 2 * num if kind == "int4" else num
    size = _packed_bytes(kind, rows, columns)
    groups = (*stack, -(-rows // group_size), columns)
    if not size or group_size < 1 or (group_size < rows and group_size % 8):
        raise ValueError(f"`group_size` must be a multiple of 8, or all {rows} rows, got {group_size}")
    if values.dtype.itemsize != 1:
        raise ValueError(f"`values` must have 1 byte per element, got {values.dtype}")
    for name, floats in ("scales", scales), ("offsets", offsets):
        if floats is not None and floats.shape != groups:
            raise ValueError(f"`{name}` must have the shape {groups}, got {floats.shape}")
    if kind == "fp8":
        scales = _with_nan(values, scales, group_size, permutation)
    order: np.ndarray | None = None
    if permutation is not None:
        order = np.ascontiguousarray(permutation, np.int32)
        if order.shape != (*stack, rows) or order.min() < 0 or order.max() >= rows:
            raise ValueError(f"`permutation` must have indices of {rows} rows, got the shape {order.shape}")
    packed = _aligned((*stack, size))
    function = native.library().jax_paged_pack_quantized
    function.restype = None
    for i in np.ndindex(*stack):
        own = np.ascontiguousarray(values[i]).view(np.uint8)
        own_order = None if order is None else order[i].ctypes.data_as(ctypes.c_void_p)
        sizes = ctypes.c_int64(rows), ctypes.c_int64(columns)
        arrays = own.ctypes.data_as(ctypes.c_void_p), own_order, packed[i].ctypes.data_as(ctypes.c_void_p)
        function(kind.encode(), *sizes, *arrays)
    by_panel = _by_panel(scales), None if offsets is None else _by_panel(offsets)
    layout = PackedLayout(kind, rows, columns, min(group_size, rows))
    return PackedQuantized(packed, *by_panel, order, layout)


def _with_nan(
    values: np.ndarray, scales: np.ndarray, group_size: int, permutation: np.ndarray | None
) -> np.ndarray:
    """Returns scales that are NaN for groups with a NaN, which the products would read as a number."""
    is_nan = (values.view(np.uint8) & 127) == 127
    if not is_nan.any():
        return scales
    if permutation is not None:
        is_nan = np.take_along_axis(is_nan, permutation[..., None], axis=-2)
    starts = np.arange(0, values.shape[-2], group_size)
    return np.where(np.logical_or.reduceat(is_nan, starts, axis=-2), np.nan, scales).astype(scales.dtype)


def _aligned(shape: tuple[int, ...]) -> UInt8[np.ndarray, "*n"]:
    """Returns an array whose memory JAX can use without copying it."""
    alignment, size = 64, math.prod(shape)
    memory = np.empty(size + alignment, np.uint8)
    first = -memory.ctypes.data % alignment
    return memory[first : first + size].reshape(shape)


def _by_panel(floats: Float[np.ndarray, "*e g o"]) -> Float[np.ndarray, "*e p g c"]:
    """Returns scales or offsets in panels; those of columns that do not exist are 0."""
    *stack, groups, columns = floats.shape
    panels = -(-columns // PANEL)
    padded = np.zeros((*stack, groups, panels * PANEL), floats.dtype)
    padded[..., :columns] = floats
    return np.ascontiguousarray(padded.reshape(*stack, groups, panels, PANEL).swapaxes(-3, -2))


def merged(kernels: Sequence[PackedQuantized]) -> tuple[PackedQuantized, list[int]]:
    """Returns one packed kernel with the columns of several, and the first column of each in it.

    Args:
        kernels: Packed kernels in host memory, not stacks, with equal `mergeable` keys.
    """
    sizes = [k.values.size - _READ_AHEAD for k in kernels]
    rest = kernels[-1].values[sizes[-1] :]
    values = np.concatenate([*(k.values[:size] for k, size in zip(kernels, sizes, strict=True)), rest])
    scales = np.concatenate([k.scales for k in kernels])
    offsets = None if kernels[0].offsets is None else np.concatenate([k.offsets for k in kernels])
    starts = np.cumsum([0, *(PANEL * len(k.scales) for k in kernels)]).tolist()
    layout = dataclasses.replace(
        kernels[0].layout, columns=starts[len(kernels) - 1] + kernels[-1].layout.columns
    )
    return PackedQuantized(values, scales, offsets, None, layout), starts[:-1]


def mergeable(kernel: PackedQuantized) -> tuple[Any, ...] | None:
    """Returns a key that is equal for kernels that `merged` can merge; None for a kernel that it cannot."""
    if kernel.permutation is not None:
        return None
    offsets = None if kernel.offsets is None else kernel.offsets.dtype
    layout = dataclasses.replace(kernel.layout, columns=0)
    return layout, kernel.scales.dtype, offsets


def multiply(
    x: Float[Array, "*t i"],
    packed: PackedQuantized,
    dtype: DTypeLike,
    group_sizes: Int[Array, " e"] | None = None,
    *,
    max_width: int | None = None,
) -> Float[Array, "*t o"]:
    """Multiplies rows by a packed kernel, or the rows of each expert by its kernel.

    The gradient with respect to x is defined; weights are constants.

    Args:
        x: float32, bfloat16 or float16 [*T, I]. For experts [N, I], sorted by expert.
        packed: The packed kernel, or those of all experts.
        dtype: Dtype of the result: float32, bfloat16 or float16.
        group_sizes: int32 [E], number of rows of each expert. Results of rows that belong to no expert are 0.
            None if `packed` is a single kernel.
        max_width: Upper limit for the number of floats in a vector, for tests.

    Returns:
        [*T, O].
    """
    rows = x.reshape(-1, x.shape[-1])
    sizes = jnp.zeros(0, jnp.int32) if group_sizes is None else group_sizes.astype(jnp.int32)
    width = _width() if max_width is None else max_width
    y = _multiply(rows, sizes, packed, jnp.dtype(dtype), width)
    return y.reshape(*x.shape[:-1], packed.layout.columns)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _multiply(x: Array, sizes: Array, packed: PackedQuantized, dtype: jnp.dtype, max_width: int) -> Array:
    return _call(x, sizes, packed, None, "", dtype, max_width)


def _forward(
    x: Array, sizes: Array, packed: PackedQuantized, dtype: jnp.dtype, max_width: int
) -> tuple[Array, tuple[Array, Array, PackedQuantized]]:
    return _multiply(x, sizes, packed, dtype, max_width), (x, sizes, packed)


def _backward(
    dtype: jnp.dtype, max_width: int, saved: tuple[Array, Array, PackedQuantized], cotangent: Array
) -> tuple[Array, None, None]:
    x, _, packed = saved
    if packed.values.ndim > 1:
        raise NotImplementedError("products with quantized experts have no gradient")
    transposed = columns(packed, jnp.arange(packed.layout.columns), jnp.float32)
    return (cotangent.astype(jnp.float32) @ transposed).astype(x.dtype), None, None


_multiply.defvjp(_forward, _backward)


def multiply_gated(
    x: Float[Array, "*t i"],
    gate: PackedQuantized,
    up: PackedQuantized,
    activation: str,
    *,
    max_width: int | None = None,
) -> Float[Array, "*t o"]:
    """Returns activation(x @ gate) * (x @ up), computed in float32 and rounded once.

    Args:
        x: float32, bfloat16 or float16 [*T, I].
        gate: A packed kernel.
        up: A packed kernel with an equal `mergeable` key and the same number of columns.
        activation: One of ACTIVATIONS.
        max_width: See `multiply`.

    Returns:
        [*T, O] in the dtype of x.
    """
    rows = x.reshape(-1, x.shape[-1])
    width = _width() if max_width is None else max_width
    y = _call(rows, jnp.zeros(0, jnp.int32), gate, up, activation, x.dtype, width)
    return y.reshape(*x.shape[:-1], gate.layout.columns)


def columns(packed: PackedQuantized, indices: Int[Array, "*n"], dtype: DTypeLike) -> Float[Array, "*n i"]:
    """Returns some columns of a packed kernel as floats, computed in float32 and rounded once.

    Args:
        packed: The packed kernel.
        indices: int32 [*N], the columns. For an index that is out of bounds, the result is NaN.
        dtype: Dtype of the result: float32, bfloat16 or float16.

    Returns:
        [*N, I].
    """
    flat = indices.reshape(-1).astype(jnp.int32)
    result = jax.ShapeDtypeStruct((len(flat), packed.layout.rows), jnp.dtype(dtype))
    call = jax.ffi.ffi_call(native.target("jax_paged_quantized_columns"), result, vmap_method="sequential")
    found = call(
        flat,
        *_operands(packed),
        _permutation(packed),
        **_attributes(packed),
        columns=np.int64(packed.layout.columns),
        max_width=np.int64(_width()),
    )
    return found.reshape(*indices.shape, packed.layout.rows)


def _call(
    x: Array,
    sizes: Array,
    packed: PackedQuantized,
    up: PackedQuantized | None,
    activation: str,
    dtype: jnp.dtype,
    max_width: int,
) -> Float[Array, "n o"]:
    result = jax.ShapeDtypeStruct((x.shape[0], packed.layout.columns), dtype)
    call = jax.ffi.ffi_call(native.target("jax_paged_multiply_quantized"), result, vmap_method="sequential")
    no_up: tuple[Array, ...] = jnp.zeros(0, jnp.uint8), jnp.zeros(0), jnp.zeros(0)
    return call(
        x,
        sizes,
        *_operands(packed),
        _permutation(packed),
        *(no_up if up is None else _operands(up)),
        **_attributes(packed),
        activation=activation,
        max_width=np.int64(max_width),
    )


def _operands(packed: PackedQuantized) -> tuple[UInt8[Array, "*b"], Array, Array]:
    """Returns values, scales and offsets; an array without elements means that there are no offsets."""
    return packed.values, packed.scales, jnp.zeros(0) if packed.offsets is None else packed.offsets


def _permutation(packed: PackedQuantized) -> Int[Array, "*i"]:
    return jnp.zeros(0, jnp.int32) if packed.permutation is None else packed.permutation


def _attributes(packed: PackedQuantized) -> dict[str, Any]:
    return {"kind": packed.layout.kind, "group_size": np.int64(packed.layout.group_size)}


def _packed_bytes(kind: Kind, rows: int, columns: int) -> int:
    """Returns the size of a packed kernel (bytes); 0 if there can be no kernel of this type and shape."""
    function = native.library().jax_paged_quantized_bytes
    function.restype = ctypes.c_int64
    return function(kind.encode(), ctypes.c_int64(rows), ctypes.c_int64(columns))


@functools.cache
def _width() -> int:
    """Returns the number of floats in the widest vectors whose products are right on this machine.

    Each set of instructions has its own code. Before it is used, its products are compared with those of the
    baseline.
    """
    check = native.library().jax_paged_wrong_variant
    check.restype = ctypes.c_char_p
    for width in _WIDTHS[:-1]:
        wrong = check(ctypes.c_int64(width))
        if wrong is None:
            return width
        _LOGGER.warning(
            "products of quantized weights use narrower, slower instructions than this processor has because "
            "those of the variant %s give wrong results",
            wrong.decode(),
        )
    return _WIDTHS[-1]
