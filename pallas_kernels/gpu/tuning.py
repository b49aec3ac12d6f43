"""Helpers of all Pallas kernels: the target GPU, tile sizes, the interpreter, and work-arounds for Mosaic."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend import backend as jax_backend
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector
from jaxtyping import Array, Float, Int

LOG2E = 1.4426950408889634
# This is finite so that a row with nothing to attend to gets exp2(0), which is masked later, instead of NaN.
MASKED_SCORE = -1e30
HEAD_DIMS = (64, 80, 96, 128, 256)
PAGE_SIZES = (16, 32, 64)
MAX_GROUP_SIZE = 16
# Number of SMs in the interpreter and the emulator. Few SMs result in few parts, which simulate faster.
INTERPRETED_SMS = 4
# Supported major compute capabilities: Ampere and Ada (8), Hopper (9), Blackwell in data centers (10) and in
# other GPUs (12).
GENERATIONS = (8, 9, 10, 12)
# Warps of a warpgroup.
WARPS = 4


@dataclasses.dataclass(frozen=True)
class Target:
    """The GPU that a kernel is lowered for.

    Args:
        capability: CUDA compute capability, (9, 0) for an H100.
        num_sms: Number of streaming multiprocessors (SMs).
        smem_bytes: Maximum shared memory of a thread block (bytes).
    """

    capability: tuple[int, int]
    num_sms: int
    smem_bytes: int

    @property
    def has_tma(self) -> bool:
        """Whether tiles are copied by TMA, with a barrier; otherwise they are copied by cp.async."""
        return self.capability >= (9, 0)

    @property
    def has_wgmma(self) -> bool:
        """Whether the GPU has wgmma, the warpgroup product from shared memory, which only Hopper has."""
        return self.capability[0] == 9


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Tile sizes of an attention kernel.

    Args:
        block_rows: Query rows per tile. A query has one row for each query head of the kv head.
        block_tokens: Tokens whose keys and values a pipeline stage holds, a multiple of the page size.
        num_stages: Pipeline stages, one of which is being read while the others are being copied.
        num_parts: Number of parts, and thus of thread blocks per kv head (paged_decode only).
        has_tma: Target.has_tma of the GPU that the sizes were chosen for.
        has_wgmma: Target.has_wgmma of this GPU (ragged_attention only; paged_decode always uses mma.sync).
    """

    block_rows: int
    block_tokens: int
    num_stages: int
    num_parts: int
    has_tma: bool
    has_wgmma: bool = False


def target(*, interpret: bool = False) -> Target:
    """Returns the GPU that the current trace is lowered for, determined in the same way as Mosaic does.

    This is the default device, or the device of the abstract mesh if its kind differs from the default
    device's. A device without the attribute `compute_capability`, as on a machine without a GPU, is treated
    as an H100. So is the interpreter.

    Args:
        interpret: Whether the kernel runs in the interpreter.

    Raises:
        ValueError: If the device is a GPU that the kernels do not support.
    """
    device = jax_backend.get_default_device()
    abstract_device = jax.sharding.get_abstract_mesh().abstract_device
    if abstract_device is not None and abstract_device.device_kind != device.device_kind:
        device = abstract_device
    name = "9.0" if interpret else getattr(device, "compute_capability", "9.0")
    major, _, minor = name.partition(".")
    # The compute capability of AMD GPUs is a name such as gfx942.
    capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
    if capability[0] not in GENERATIONS:
        raise ValueError(
            "the compute capability of the device must be one of "
            f"{', '.join(f'{generation}.x' for generation in GENERATIONS)} with backend 'pallas', got {name} "
            f"({device.device_kind})"
        )
    # These numbers are used if the device does not report its number of SMs.
    num_sms, smem_kib = {(8, 0): (108, 163), (8, 7): (16, 163), (9, 0): (132, 227)}.get(capability, (64, 99))
    if capability[0] == 10:
        num_sms, smem_kib = 148, 227
    num_sms = getattr(device, "core_count", None) or getattr(device, "num_cores", None) or num_sms
    return Target(capability, INTERPRETED_SMS if interpret else num_sms, smem_kib * 1024)


def check_smem(smem_bytes: int, gpu: Target, what: str) -> None:
    """Raises ValueError if a kernel needs more shared memory than a GPU has.

    Args:
        smem_bytes: Shared memory of the kernel (bytes).
        gpu: The GPU.
        what: The kernel and its shape, for the error message.
    """
    if smem_bytes > gpu.smem_bytes:
        raise ValueError(
            f"the shared memory of {what} must be at most {gpu.smem_bytes} bytes on compute capability "
            f"{gpu.capability[0]}.{gpu.capability[1]}, got {smem_bytes}. Backend 'xla' supports any shape"
        )


def check_shape(q: Array, kv_pages: Array, *, interpret: bool) -> None:
    """Raises ValueError if the attention kernels do not support these shapes and dtypes.

    Args:
        q: [rows, H, D].
        kv_pages: [P, 2, K, S, D].
        interpret: Whether the kernel runs in the interpreter, which also supports float32.
    """
    _, _, kv_heads, page_size, _ = kv_pages.shape
    head_dim = q.shape[2]
    dtypes = ("bfloat16", "float16", "float32") if interpret else ("bfloat16", "float16")
    for name, value, allowed in (
        ("dtype", q.dtype.name, dtypes),
        ("head_dim", head_dim, HEAD_DIMS),
        ("page_size", page_size, PAGE_SIZES),
        ("the number of query heads per kv head", q.shape[1] // kv_heads, range(1, MAX_GROUP_SIZE + 1)),
    ):
        if value not in allowed:
            raise ValueError(
                f"{name} of `kv_pages` and `q` must be one of {', '.join(map(str, allowed))} with backend "
                f"'pallas', got {value}. Backend 'xla' has no such limit"
            )


def interpret_params(interpret: bool) -> plgpu.InterpretGPUParams | bool:
    """Returns the `interpret` argument of plgpu.kernel. The interpreter raises an error at a race."""
    # Races between copies on the same simulated TMA thread are not detected, so there must be more threads
    # than copies in flight.
    params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)
    return params if interpret else False


def smem_transforms(head_dim: int, dtype: jnp.dtype, cp_async_rows: int = 32) -> tuple[Any, ...]:
    """Returns the transforms of a [..., tokens, head_dim] buffer: the widest swizzle that is possible.

    Args:
        head_dim: Elements of a row.
        dtype: Dtype of the elements.
        cp_async_rows: Number of rows that one cp.async copy writes. The number of [8, swizzle] tiles in a
            copy must be a multiple of four, so that each warp has the same number. TMA has no such limit.

    Raises:
        ValueError: If no swizzle is possible.
    """
    row_bytes = head_dim * dtype.itemsize
    gpu: Any = plgpu  # pyright considers both classes abstract
    for swizzle in (128, 64, 32):
        if row_bytes % swizzle == 0 and cp_async_rows // 8 * (row_bytes // swizzle) % 4 == 0:
            return gpu.TilingTransform((8, swizzle // dtype.itemsize)), gpu.SwizzleTransform(swizzle)
    raise ValueError(
        f"page_size must be 32 or 64 with backend 'pallas' and head_dim {head_dim} on a GPU of compute "
        f"capability below 9.0, got {cp_async_rows}. Backend 'xla' has no such limit"
    )


def mma(
    acc: Float[Array, "m n"], a: Float[Array, "m k"], b: Float[Array, "k n"], *, interpret: bool
) -> Float[Array, "m n"]:
    """Returns acc + a @ b, by mma.sync; by a plain dot in the interpreter, which has no tensor cores."""
    if interpret:
        return acc + jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32))
    return plgpu.mma(acc, a, b)


def iota(shape: tuple[int, ...], dimension: int, layout: Any) -> Int[Array, "m n"]:
    """Returns an array of indices along a dimension.

    The indices are created in one dimension and broadcast. In two dimensions, JAX (0.11.2, 0.12.0) returns
    wrong indices if a register holds two rows of a column, as in the right operand of mma.sync.
    """
    line = plgpu.broadcasted_iota(jnp.int32, (shape[dimension],), 0, layout=layout.reduce(1 - dimension))
    return jax.lax.broadcast_in_dim(line, shape, [dimension])


def gather_table(
    table_ref: Any, index: Int[Array, "m n"], layout: Any, *, interpret: bool
) -> Float[Array, "m n"]:
    """Returns elements of a float32 table in global memory (a gather, which Mosaic does not offer).

    Args:
        table_ref: [N].
        index: Indices into the table, which must be in range.
        layout: Layout of the index and the result.
        interpret: Whether the kernel runs in the interpreter.
    """
    if interpret:
        return table_ref[...][index]

    result = plgpu.ShapeDtypeStruct(index.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=result)
    def load(_: Any, table: Any, places: Any) -> Any:
        f32, pointer = ir.F32Type.get(), mgpu_utils.memref_ptr(table)
        registers = np.empty_like(places.registers)
        for at, register in np.ndenumerate(places.registers):
            elements = [
                llvm.load(f32, mgpu_utils.getelementptr(pointer, [vector.extract(register, [], [i])], f32))
                for i in range(ir.VectorType(register.type).shape[0])
            ]
            vectors = [vector.broadcast(ir.VectorType.get((1,), f32), x) for x in elements]
            registers[at] = mgpu_utils.vector_concat(vectors)
        return mgpu.FragmentedArray(_registers=registers, _layout=places.layout, _is_signed=None)

    return load(table_ref, index)


def store(ref: Any, value: Array) -> None:
    """Writes `value` to a reference, even if its rows are not multiples of a cache line."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # jax 0.11 has only the assignment; in 0.12 it requires whole cache lines
        ref[...] = value


def row_layout(num_elements: int) -> Any:
    """Returns a layout of an array with this number of elements; None if the default layout is suitable.

    The default layout requires a number of elements that 128 threads can share evenly. The layout here
    requires rows with a multiple of 16 elements. Eight lanes hold 16 consecutive elements; the other lanes of
    the warp, and the other warps, hold copies of them.
    """
    if num_elements % 128 == 0:
        return None
    return plgpu.Layout.TILED(
        plgpu.Tiling(((1, 16), (2,))),
        warp_dims=(plgpu.Replicated(4),),
        lane_dims=(-2, plgpu.Replicated(4)),
        vector_dim=-1,
    )


def copy_to_smem(source: Any, target: Any, barrier: Any) -> None:
    """Starts a copy from global to shared memory.

    Args:
        source: Reference to global memory.
        target: Reference to shared memory.
        barrier: The barrier at which TMA arrives when the copy is done. If it is None, the copy uses
            cp.async.
    """
    if barrier is None:
        plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
    else:
        plgpu.copy_gmem_to_smem(source, target, barrier)


def wait_cp_async(is_last: Array, last_in_flight: int, in_flight: int) -> None:
    """Waits for all cp.async copies except the most recent ones, and synchronizes the warps.

    Args:
        is_last: Whether fewer copies than usual are in flight.
        last_in_flight: Number of copies that may stay in flight if `is_last`.
        in_flight: Number of copies that may stay in flight otherwise.
    """
    if last_in_flight == in_flight:
        plgpu.wait_gmem_to_smem(in_flight)
        return
    pl.when(is_last)(functools.partial(plgpu.wait_gmem_to_smem, last_in_flight))
    pl.when(jnp.logical_not(is_last))(functools.partial(plgpu.wait_gmem_to_smem, in_flight))


def sync_warps(has_tma: bool) -> None:
    """Synchronizes the warps of a warpgroup, so that each can read what the others wrote to shared memory.

    On sm_90 and later this also fences the async proxy. Before sm_90 there is no such proxy, and the barrier
    of a wait for copies suffices.
    """
    if has_tma:
        plgpu.commit_smem()
    else:
        plgpu.wait_gmem_to_smem(0)
