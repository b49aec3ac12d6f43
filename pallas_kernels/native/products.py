"""Matrix products with packed kernels on a CPU, by oneDNN.

A step's weights are its arguments, so XLA brings them into the order that its products read them in anew at
every step. Here it is done once: `pack` makes an array that only `multiply` can read, in the same process.

oneDNN is a library of its own (`pip install "jax-paged[onednn]"`), found and loaded when it is first asked
for.
"""

import ctypes
import functools
import importlib.metadata
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jax_paged.pallas_kernels import native

Products = Literal["auto", "onednn", "xla"]

# The package that the extra installs, and the library of any package: its name has the interface's version.
PACKAGE, LIBRARY = "onednn-cpu-gomp", "libdnnl.so.3"


def resolve_products(products: str, dtype: jnp.dtype, *, name: str = "products") -> Literal["onednn", "xla"]:
    """Returns what multiplies on this machine.

    Args:
        products: "onednn"; "xla"; or "auto": oneDNN on a CPU where it can be used, else XLA.
        dtype: Of weights and activations.
        name: Name of the caller's argument, for error messages.

    Raises:
        ValueError: If the value is unknown, or is "onednn" where that can't be used.
    """
    if products not in get_args(Products):
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, get_args(Products)))}, got {products!r}"
        )
    if products == "xla":
        return "xla"
    reason = problem(dtype)
    if reason is None:
        return "onednn"
    if products == "onednn":
        raise ValueError(
            f"`{name}` must be 'auto' or 'xla' because oneDNN can't be used ({reason}), got 'onednn'"
        )
    return "xla"


def problem(dtype: jnp.dtype) -> str | None:
    """Returns why oneDNN can't multiply arrays of a type, None if it can: a clause without a full stop."""
    platform = jax.devices()[0].platform
    if platform != "cpu":
        return f"it multiplies on a CPU, and the device is a {platform}"
    if not native.is_built():
        return f"the native backend can't be used: {native.problem()}"
    reason = _load()
    if reason is not None:
        return reason
    if not _packed_bytes(1, 1, dtype):
        return f"it has no packed products of {dtype} for this processor"
    return None


def pack(
    kernel: Float[Array, "i o"] | Float[Array, "o i"], *, transposed: bool = False
) -> UInt8[Array, " bytes"]:
    """Packs a kernel for `multiply`.

    Args:
        kernel: float32 or bfloat16.
        transposed: Whether it is [out, in].

    Returns:
        As many bytes as the kernel has, rounded up to a few whole columns and rows.

    Raises:
        ValueError: If oneDNN can't be used for this type.
    """
    reason = problem(kernel.dtype)
    if reason is not None:
        raise ValueError(f"kernel can't be packed: {reason}")
    rows, columns = kernel.shape[::-1] if transposed else kernel.shape
    return _pack(kernel, transposed, _packed_bytes(rows, columns, kernel.dtype))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _pack(kernel: Array, transposed: bool, num_bytes: int) -> Array:
    packed = jax.ShapeDtypeStruct((num_bytes,), jnp.uint8)
    return jax.ffi.ffi_call(native.target("jax_paged_pack_kernel"), packed)(kernel, transposed=transposed)


def multiply(
    x: Float[Array, "*t i"], packed: UInt8[Array, " bytes"], columns: int, dtype: jnp.dtype
) -> Float[Array, "*t o"]:
    """Multiplies rows by a packed kernel; sums are float32.

    A row's result depends neither on the other rows nor on the number of threads, in float32 to the bit.

    Args:
        x: Rows, of the kernel's type.
        packed: As `pack` returns it.
        columns: Of the kernel.
        dtype: Of the result: that of x, or float32.
    """
    rows = x.reshape(-1, x.shape[-1])
    result = jax.ShapeDtypeStruct((rows.shape[0], columns), dtype)
    y = jax.ffi.ffi_call(native.target("jax_paged_multiply_packed"), result)(rows, packed)
    return y.reshape(*x.shape[:-1], columns)


def multiply_gated(
    x: Float[Array, "*t i"],
    gate: UInt8[Array, " bytes"],
    up: UInt8[Array, " bytes"],
    columns: int,
    activation: str,
) -> Float[Array, "*t o"]:
    """Returns activation(x @ gate) * (x @ up), as `multiply` would, without storing the two products.

    Args:
        x: Rows, of the kernels' type.
        gate: As `pack` returns it.
        up: As gate, of a kernel of the same shape.
        columns: Of each kernel.
        activation: "silu", "relu", "gelu", "gelu_new" or "gelu_pytorch_tanh"; computed in float32.
    """
    rows = x.reshape(-1, x.shape[-1])
    result = jax.ShapeDtypeStruct((rows.shape[0], columns), x.dtype)
    call = jax.ffi.ffi_call(native.target("jax_paged_multiply_gated"), result)
    return call(rows, gate, up, activation=activation).reshape(*x.shape[:-1], columns)


def _packed_bytes(rows: int, columns: int, dtype: jnp.dtype) -> int:
    """Returns the size of a packed kernel, 0 if oneDNN has no quick products for it."""
    function = native.library().jax_paged_packed_bytes
    function.restype = ctypes.c_int64
    return function(ctypes.c_int64(rows), ctypes.c_int64(columns), dtype == np.float32)


@functools.cache
def _load() -> str | None:
    """Loads oneDNN; returns why it can't be used, None if it can."""
    path = _find()
    load = native.library().jax_paged_load_onednn
    load.restype = ctypes.c_char_p
    reason = load(path.encode())
    if reason is None:
        return None
    return f"{path} can't be used ({reason.decode()}): pip install 'jax-paged[onednn]'"


def _find() -> str:
    """Returns the library of the installed package, else the name by which the system's is found."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    return next((str(file.locate().resolve()) for file in files if file.name == LIBRARY), LIBRARY)
