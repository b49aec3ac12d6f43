"""Matrix products with packed weight matrices on a CPU, computed by oneDNN.

A "kernel" in this module is a weight matrix. The weights are arguments of the jitted step, so XLA would
rearrange them into the layout of its matrix products in every step. With oneDNN this is done once: `pack`
returns an array in oneDNN's layout, which only `multiply` and `multiply_gated` in the same process can read.

oneDNN is a separate library (`pip install "jax-paged[onednn]"`). It is located and loaded on first use.
"""

import ctypes
import functools
import importlib.metadata
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jax_paged.pallas_kernels import native

MatmulBackend = Literal["auto", "onednn", "xla"]

# The package that the extra `onednn` installs, and the file name of the library in any package. The file name
# contains the version of the interface.
PACKAGE, LIBRARY = "onednn-cpu-gomp", "libdnnl.so.3"


def resolve_matmul_backend(
    matmul_backend: str, dtype: jnp.dtype, *, name: str = "matmul_backend"
) -> Literal["onednn", "xla"]:
    """Returns the library that multiplies matrices on this machine.

    Args:
        matmul_backend: "onednn", "xla", or "auto". "auto" means oneDNN on a CPU if it can be used, otherwise
            XLA.
        dtype: Dtype of weights and activations.
        name: Name of the caller's argument, for error messages.

    Raises:
        ValueError: If the value is unknown, or is "onednn" and oneDNN cannot be used.
    """
    if matmul_backend not in get_args(MatmulBackend):
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, get_args(MatmulBackend)))}, got {matmul_backend!r}"
        )
    if matmul_backend == "xla":
        return "xla"
    reason = problem(dtype)
    if reason is None:
        return "onednn"
    if matmul_backend == "onednn":
        raise ValueError(
            f"`{name}` must be 'auto' or 'xla' because oneDNN can't be used ({reason}), got 'onednn'"
        )
    return "xla"


def problem(dtype: jnp.dtype) -> str | None:
    """Returns the reason why oneDNN cannot multiply arrays of `dtype`; None if it can.

    The reason is a clause without a full stop.
    """
    platform = jax.devices()[0].platform
    if platform != "cpu":
        return f"it needs a CPU, and the device is a {platform}"
    if not native.is_built():
        return f"the native backend can't be used: {native.problem()}"
    reason = _load()
    if reason is not None:
        return reason
    if not _packed_bytes(1, 1, dtype):
        return f"it does not support packed weights of {dtype} on this processor"
    return None


def pack(
    kernel: Float[Array, "i o"] | Float[Array, "o i"], *, transposed: bool = False
) -> UInt8[Array, " bytes"]:
    """Returns a kernel in the layout of `multiply`.

    Args:
        kernel: float32 or bfloat16.
        transposed: Whether the kernel has the shape [out, in].

    Returns:
        An array with the size of the kernel, rounded up to whole blocks of rows and columns.

    Raises:
        ValueError: If oneDNN cannot be used for this dtype.
    """
    reason = problem(kernel.dtype)
    if reason is not None:
        raise ValueError(f"the weights can't be packed for oneDNN: {reason}")
    rows, columns = kernel.shape[::-1] if transposed else kernel.shape
    return _pack(kernel, transposed, _packed_bytes(rows, columns, kernel.dtype))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _pack(kernel: Array, transposed: bool, num_bytes: int) -> Array:
    packed = jax.ShapeDtypeStruct((num_bytes,), jnp.uint8)
    return jax.ffi.ffi_call(native.target("jax_paged_pack_kernel"), packed)(kernel, transposed=transposed)


def multiply(
    x: Float[Array, "*t i"], packed: UInt8[Array, " bytes"], columns: int, dtype: DTypeLike
) -> Float[Array, "*t o"]:
    """Multiplies rows by a packed kernel, with float32 accumulation.

    A row's result does not depend on the other rows or on the number of threads. For float32 this holds bit
    for bit.

    Args:
        x: Rows, in the dtype of the kernel.
        packed: A kernel, as returned by `pack`.
        columns: Number of columns of the kernel.
        dtype: Dtype of the result: the dtype of x, or float32.
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
    """Returns activation(x @ gate) * (x @ up) without storing the two products.

    Args:
        x: Rows, in the dtype of the kernels.
        gate: A kernel, as returned by `pack`.
        up: A kernel of the same shape, as returned by `pack`.
        columns: Number of columns of each kernel.
        activation: "silu", "relu", "gelu", "gelu_new" or "gelu_pytorch_tanh"; computed in float32.
    """
    rows = x.reshape(-1, x.shape[-1])
    result = jax.ShapeDtypeStruct((rows.shape[0], columns), x.dtype)
    call = jax.ffi.ffi_call(native.target("jax_paged_multiply_gated"), result)
    return call(rows, gate, up, activation=activation).reshape(*x.shape[:-1], columns)


def _packed_bytes(rows: int, columns: int, dtype: jnp.dtype) -> int:
    """Returns the size of a packed kernel (bytes); 0 if oneDNN has no fast product for it."""
    function = native.library().jax_paged_packed_bytes
    function.restype = ctypes.c_int64
    return function(ctypes.c_int64(rows), ctypes.c_int64(columns), dtype == np.float32)


@functools.cache
def _load() -> str | None:
    """Loads oneDNN. Returns the reason why it cannot be used; None if it can."""
    path = _find()
    load = native.library().jax_paged_load_onednn
    load.restype = ctypes.c_char_p
    reason = load(path.encode())
    if reason is None:
        return None
    return f"{path} can't be used ({reason.decode()}); run pip install 'jax-paged[onednn]'"


def _find() -> str:
    """Returns the path of the library in the installed package, otherwise a name for the system's loader."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    return next((str(file.locate().resolve()) for file in files if file.name == LIBRARY), LIBRARY)
