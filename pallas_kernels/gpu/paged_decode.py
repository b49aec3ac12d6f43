"""The paged_decode kernel: split-K over parts of equal length, then combine.

The blocks of all contexts, one sequence after the other, are cut into parts of equal length, as many as fill
the GPU. A part may begin and end within a sequence; what it has of a sequence is an item. A sequence with a
single item is finished there; the items of others are joined by combine.

    sequences    a a a a a a a a a a | b b | c c c c c c
    parts        0 0 0 0 0 0 1 1 1 1   1 1   2 2 2 2 2 2
    items        0           1         2     4              part + sequence: no two are equal

Each (part, kv head) is a block of threads, which walks its blocks through a ring of stages in shared memory,
page by page: one TMA copy per tile of a page on sm_90, cp.async on sm_80.

    stages       | block i: wait, attend | block i+1: in flight | block i+2: in flight |

The query heads of a kv head are the M = 16 rows of mma.sync on both architectures. wgmma, on sm_90, has an M
of 64: three quarters of the softmax and of the accumulators would be padding, and its register operand does
not run in the interpreter of jax 0.11. Decode waits for memory, and by its number of instructions mma.sync
fed by ldmatrix keeps up with it. No version of this kernel has been timed yet.

Mosaic puts a barrier before and after all that touches shared memory, if it is not told otherwise
(unsafe_no_auto_barriers). Here the warps meet three times per block: twice for the maximum of the scores,
and once with the weights, when all warps have read the block before, whose stage is then filled again.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels.gpu import quantized_tile, tuning
from jax_paged.pallas_kernels.gpu.combine import combine
from jax_paged.pallas_kernels.gpu.decode_item import ROWS, DecodeShape, Item, Refs, Work
from jax_paged.pallas_kernels.quantization import is_quantized


def paged_decode(
    q: Float[Array, "b h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    distance_bias: Float[Array, "h n"] | None = None,
    config: tuning.KernelConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "b h d"]:
    """See ops.paged_decode.

    Args:
        config: Tile sizes; None for those of decode_config.
        interpret: Whether to run in the interpreter.

    Raises:
        ValueError: If the shapes are not supported, or need more shared memory than the GPU has.
    """
    shape = decode_shape(
        q, kv_pages, scale=scale, window=window, soft_cap=soft_cap, config=config, interpret=interpret
    )
    work = work_list(context_lens, shape.config.num_parts, shape.tokens, window)
    return attend_with_stats(shape, q, kv_pages, block_tables, context_lens, work, sinks, distance_bias)[0]


def decode_shape(
    q: Float[Array, "b h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    config: tuning.KernelConfig | None = None,
    interpret: bool,
) -> DecodeShape:
    """Returns the static shape of the kernel for these arrays; the arguments are those of paged_decode.

    Raises:
        ValueError: If the shapes are not supported, or need more shared memory than the GPU has.
    """
    tuning.check_shape(q, kv_pages, interpret=interpret)
    gpu = tuning.target(interpret=interpret)
    (_, num_heads, head_dim), (_, _, kv_heads, page_size, _) = q.shape, kv_pages.shape
    shape = DecodeShape(
        config=config or decode_config(gpu, kv_pages.shape, kv_pages.dtype), num_heads=num_heads,
        kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=q.dtype,
        is_quantized=is_quantized(kv_pages), scale=scale, window=window, soft_cap=soft_cap,
        interpret=interpret,
    )  # fmt: skip
    assert shape.tokens % math.lcm(page_size, 32) == 0, shape.config
    what = f"paged_decode with head_dim {head_dim} and page_size {page_size}"
    tuning.check_smem(shape.smem_bytes, gpu, what)
    return shape


def decode_config(gpu: tuning.Target, pool_shape: tuple[int, ...], dtype: Any) -> tuning.KernelConfig:
    """Returns sizes with which two blocks of threads fit on a multiprocessor, and parts that fill all.

    Args:
        gpu: The GPU that the kernel is lowered for.
        pool_shape: [P, 2, K, S, D].
        dtype: Dtype of the pool.
    """
    _, _, kv_heads, page_size, head_dim = pool_shape
    is_bytes = jnp.dtype(dtype).itemsize == 1
    head_dim -= is_bytes
    token_bytes = 2 * head_dim * (2 if is_bytes else jnp.dtype(dtype).itemsize)
    block_tokens = max(32, page_size, 1 << int(math.log2(32 * 1024 / token_bytes)))
    num_stages = min(
        4, max(2, (gpu.smem_bytes // 2 - 4096 - ROWS * head_dim * 4) // (block_tokens * token_bytes))
    )
    num_parts = max(1, 2 * gpu.num_sms // kv_heads)
    return tuning.KernelConfig(ROWS, block_tokens, num_stages, num_parts, gpu.has_tma)


def work_list(context_lens: Int[Array, " b"], num_parts: int, block_tokens: int, window: int | None) -> Work:
    """Cuts the contexts of a batch into parts whose lengths differ by one block at most.

    These are a few small XLA ops, equal in every layer, so a step computes them once.

    Args:
        context_lens: int32 [B].
        num_parts: N; fewer parts are used if there are fewer blocks.
        block_tokens: Tokens per block.
        window: Blocks before the last `window` tokens of a context are in no part; None for no window.
    """
    num_seqs = context_lens.shape[0]
    seqs = jnp.arange(num_seqs)
    start = jnp.zeros_like(context_lens)
    if window is not None:
        start = jnp.maximum(context_lens - window, 0) // block_tokens
    num_blocks = pl.cdiv(context_lens, block_tokens) - start
    ends = jnp.where(seqs <= seqs[:, None], num_blocks, 0).sum(1)
    begins, total = ends - num_blocks, num_blocks.sum()
    used = jnp.clip(total, 1, num_parts)
    cuts = jnp.minimum(jnp.arange(num_parts + 1), used) * total // used
    first_seq = (ends <= cuts[:-1, None]).sum(1)
    end_seq = (ends < cuts[1:, None]).sum(1) + 1
    parts = jnp.stack([first_seq, end_seq, cuts[:-1], cuts[1:]], axis=1)
    runs = jnp.stack([begins, ends, begins - start], axis=1)

    def part_of(block):  # the last one that begins at or before it
        return ((block + 1) * used - 1) // jnp.maximum(total, 1)

    counts = jnp.where(num_blocks > 0, part_of(ends - 1) - part_of(begins) + 1, 0)
    spans = jnp.stack([part_of(begins) + seqs, counts], axis=1)
    return Work(*(x.astype(jnp.int32) for x in (parts, runs, spans)))


@functools.partial(jax.jit, static_argnums=0)
def attend_with_stats(
    shape: DecodeShape,
    q: Float[Array, "b h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    work: Work,
    sinks: Float[Array, " h"] | None = None,
    distance_bias: Float[Array, "h n"] | None = None,
) -> tuple[Float[Array, "b h d"], Float[Array, "n k 2 r"]]:
    """Runs the kernel, which finishes sequences with one item, and combine, which finishes the others.

    Jitted, so that equal layers are lowered once.
    """
    num_seqs, kv_heads, group = q.shape[0], shape.kv_heads, shape.group
    rows = q.reshape(num_seqs, kv_heads, group, shape.head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, ROWS - group), (0, 0)))
    padded_sinks = bias = None
    if sinks is not None:
        sinks = sinks.astype(jnp.float32) * tuning.LOG2E
        padded_sinks = jnp.pad(sinks.reshape(kv_heads, group), ((0, 0), (0, ROWS - group)))
    if distance_bias is not None:
        bias = distance_bias.astype(jnp.float32).reshape(-1) * tuning.LOG2E
    out_ref = jax.new_ref(lax.empty(q.shape, q.dtype))

    def body(q, pool, tables, lens, work, sinks, bias, *results_and_scratch):
        _attend_part(shape, Refs(q, pool, tables, lens, work, sinks, bias, out_ref, *results_and_scratch))

    # Three items more than there are, as combine loads four at a time.
    num_items = shape.config.num_parts + num_seqs - 1 + 3
    items = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_items, kv_heads, group, shape.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_items, kv_heads, 2, ROWS), jnp.float32),
        ),
        scratch_types=_scratch_types(shape),
        # The heads of a part run next to each other: a page holds all of them.
        grid=(shape.config.num_parts, kv_heads),
        grid_names=("part", "head"),
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=tuning.interpret_params(shape.interpret),
    )(
        rows, quantized_tile.flat(kv_pages) if shape.is_quantized else kv_pages, block_tables, context_lens,
        work, padded_sinks, bias,
    )  # fmt: skip
    combine(*items, work.spans, sinks, out_ref, interpret=shape.interpret)
    return jax.freeze(out_ref), items[1]


def _scratch_types(shape: DecodeShape) -> list[Any]:
    """Returns the shared memory of Refs, from `keys` on, and the barriers."""
    copied_rows = 32 if shape.config.has_tma or shape.is_quantized else shape.page_size
    transforms = tuning.smem_transforms(shape.head_dim, shape.dtype, copied_rows)
    stages = plgpu.SMEM((shape.num_stages, shape.tokens, shape.head_dim), shape.dtype, transforms=transforms)
    transforms = tuning.smem_transforms(shape.tokens, shape.dtype)
    probs = plgpu.SMEM((ROWS, shape.tokens), shape.dtype, transforms=transforms)
    results = tuple(plgpu.SMEM((ROWS, width), jnp.float32) for _, width in shape.columns)
    barrier = plgpu.Barrier(num_arrivals=shape.pages, num_barriers=shape.num_stages)
    return [stages, stages, probs, results, (barrier, barrier) if shape.has_barriers else ()]


def _attend_part(shape: DecodeShape, refs: Refs) -> None:
    """Attends to the items of one part, for one kv head."""
    part, head = lax.axis_index("part"), lax.axis_index("head")
    first_seq, end_seq, part_begin, part_end = (refs.work.parts[part, column] for column in range(4))

    @pl.loop(first_seq, end_seq)
    def _(seq):
        run_begin, run_end, offset = (refs.work.runs[seq, column] for column in range(3))
        first = jnp.maximum(part_begin, run_begin) - offset
        last = jnp.minimum(part_end, run_end) - offset

        @pl.when(first < last)
        def _():
            length = refs.lens[seq]
            item = Item(
                shape=shape, refs=refs, part=part, head=head, seq=seq, first=first, last=last, length=length,
                last_page=lax.div(length - 1, jnp.int32(shape.page_size)),
            )  # fmt: skip
            item.attend()
