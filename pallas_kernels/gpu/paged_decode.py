"""The paged_decode kernel: one query per sequence, with split-K over parts of equal length.

Division of the work. Every context is divided into blocks of `block_tokens` tokens (one or more pages). The
blocks of all sequences, one sequence after the other, are cut into parts of equal length, as many as fill the
GPU. A part may begin and end within a sequence. The blocks of one sequence within one part are an item:

    sequences    a a a a a a a a a a | b b | c c c c c c
    parts        0 0 0 0 0 0 1 1 1 1   1 1   2 2 2 2 2 2
    items        0           1         2     4              item index = part + sequence, which is unique

The grid is (part, kv head). A thread block of 128 threads (four warps) computes the items of its part one
after the other, for one kv head. The result of a sequence with a single item is final. For other sequences,
the kernel stores the normalized result, maximum score and denominator of each item, and the kernel `combine`
merges them.

Memory:

- Global memory: queries, pool, block tables, context lengths, work list and results.
- Shared memory: a ring of `num_stages` stages, each with the keys and values of one block; the probabilities
  [16, block_tokens] of the current block; the result of the item.
- Registers: the query heads of the kv head, padded to 16 rows; the scores of the current block; the float32
  accumulator [16, D]; the running maximum and sum.

The loop over an item (`Item.attend` in decode_item.py):

1. Start copying the first num_stages - 1 blocks to their stages, with one copy per page for the keys and one
   for the values (TMA from sm_90 on, cp.async on sm_80).
2. For each block, wait for its keys and multiply them by the queries. Mask the scores if the block crosses
   the end of the context or the start of the window.
3. Update the running maximum and sum of the online softmax, and write the probabilities to shared memory.
   After a barrier, start copying the block that is num_stages - 1 ahead, to the stage of the previous block.
4. Wait for the values, multiply them by the probabilities and accumulate.
5. After the last block, divide by the denominator and write the result.

If the pool is quantized, steps 1 and 3 work differently, see quantized_tile.py.

The products use mma.sync with M = 16 on all architectures. wgmma on sm_90 has M = 64, so that three quarters
of the softmax and the accumulators would be padding, and its register operand does not run in the interpreter
of jax 0.11. Decode is limited by memory bandwidth, and according to instruction counts mma.sync with ldmatrix
keeps up. The kernel has not been timed on a GPU yet.

By default Mosaic puts a barrier before and after every access to shared memory. This kernel disables that
(unsafe_no_auto_barriers). From sm_90 on it has three barriers per block: two in the reduction of the maximum
over the warps, and one after the probabilities are written. At the last one, all warps have also finished
reading the previous block, so that its stage can be overwritten. On sm_80 the waits for the keys and for the
values take the place of the last one.
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
        q: Queries.
        kv_pages: The pool.
        block_tables: int32 [B, M], pages of the sequences.
        context_lens: int32 [B].
        scale: Factor of the scores.
        window: Sliding window (tokens); None for none.
        soft_cap: Soft cap of the scores; None for none.
        sinks: Sink logit of each head; None for none.
        distance_bias: Biases by head and distance; None for none.
        config: Tile sizes; None for the sizes of decode_config.
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
    """Returns the static shape of the kernel for the arguments of paged_decode.

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
    """Returns tile sizes such that two thread blocks fit on an SM and the parts fill all SMs.

    Args:
        gpu: The GPU that the kernel is lowered for.
        pool_shape: [P, 2, K, S, D].
        dtype: Dtype of the pool.
    """
    _, _, kv_heads, page_size, head_dim = pool_shape
    is_quantized_pool = jnp.dtype(dtype).itemsize == 1
    head_dim -= is_quantized_pool
    token_bytes = 2 * head_dim * (2 if is_quantized_pool else jnp.dtype(dtype).itemsize)
    block_tokens = max(32, page_size, 1 << int(math.log2(32 * 1024 / token_bytes)))
    num_stages = min(
        4, max(2, (gpu.smem_bytes // 2 - 4096 - ROWS * head_dim * 4) // (block_tokens * token_bytes))
    )
    num_parts = max(1, 2 * gpu.num_sms // kv_heads)
    return tuning.KernelConfig(ROWS, block_tokens, num_stages, num_parts, gpu.has_tma)


def work_list(context_lens: Int[Array, " b"], num_parts: int, block_tokens: int, window: int | None) -> Work:
    """Divides the contexts of a batch into parts whose lengths differ by at most one block.

    This takes a few small XLA operations. They are the same in every layer, so that XLA computes them once
    per step.

    Args:
        context_lens: int32 [B].
        num_parts: N. Only as many parts are used as there are blocks.
        block_tokens: Tokens per block.
        window: Sliding window (tokens): blocks entirely before the window belong to no part; None for none.
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
    seq_ranges = jnp.stack([begins, ends, begins - start], axis=1)

    def part_of(block):  # the last part that begins at or before the block
        return ((block + 1) * used - 1) // jnp.maximum(total, 1)

    counts = jnp.where(num_blocks > 0, part_of(ends - 1) - part_of(begins) + 1, 0)
    item_ranges = jnp.stack([part_of(begins) + seqs, counts], axis=1)
    return Work(*(x.astype(jnp.int32) for x in (parts, seq_ranges, item_ranges)))


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
    """Runs the kernel, and then `combine` for the sequences with several items.

    The function is jitted so that equal layers are lowered once.

    Returns:
        The attention output, and the statistics of the items (see Refs.stats).
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

    # Three more items than the kernel writes, because `combine` loads four consecutive items at a time.
    num_items = shape.config.num_parts + num_seqs - 1 + 3
    items = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_items, kv_heads, group, shape.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_items, kv_heads, 2, ROWS), jnp.float32),
        ),
        scratch_types=_scratch_types(shape),
        # The head is the fastest grid axis, because the tiles of all heads of a page are adjacent in memory.
        grid=(shape.config.num_parts, kv_heads),
        grid_names=("part", "head"),
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=tuning.interpret_params(shape.interpret),
    )(
        rows, quantized_tile.flat(kv_pages) if shape.is_quantized else kv_pages, block_tables, context_lens,
        work, padded_sinks, bias,
    )  # fmt: skip
    combine(*items, work.item_ranges, sinks, out_ref, interpret=shape.interpret)
    return jax.freeze(out_ref), items[1]


def _scratch_types(shape: DecodeShape) -> list[Any]:
    """Returns the shared memory buffers and barriers, in the order of Refs from `keys` on."""
    copied_rows = 32 if shape.config.has_tma or shape.is_quantized else shape.page_size
    transforms = tuning.smem_transforms(shape.head_dim, shape.dtype, copied_rows)
    stages = plgpu.SMEM((shape.num_stages, shape.tokens, shape.head_dim), shape.dtype, transforms=transforms)
    transforms = tuning.smem_transforms(shape.tokens, shape.dtype)
    probs = plgpu.SMEM((ROWS, shape.tokens), shape.dtype, transforms=transforms)
    results = tuple(plgpu.SMEM((ROWS, width), jnp.float32) for _, width in shape.column_ranges)
    barrier = plgpu.Barrier(num_arrivals=shape.pages, num_barriers=shape.num_stages)
    return [stages, stages, probs, results, (barrier, barrier) if shape.has_barriers else ()]


def _attend_part(shape: DecodeShape, refs: Refs) -> None:
    """Computes the items of one part, for one kv head."""
    part, head = lax.axis_index("part"), lax.axis_index("head")
    first_seq, end_seq, part_begin, part_end = (refs.work.parts[part, column] for column in range(4))

    @pl.loop(first_seq, end_seq)
    def _(seq):
        seq_begin, seq_end, offset = (refs.work.seq_ranges[seq, column] for column in range(3))
        first = jnp.maximum(part_begin, seq_begin) - offset
        end = jnp.minimum(part_end, seq_end) - offset

        @pl.when(first < end)
        def _():
            length = refs.lens[seq]
            item = Item(
                shape=shape, refs=refs, part=part, head=head, seq=seq, first=first, end=end, length=length,
                last_page=lax.div(length - 1, jnp.int32(shape.page_size)),
            )  # fmt: skip
            item.attend()
