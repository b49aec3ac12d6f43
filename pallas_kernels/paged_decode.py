"""The paged_decode kernel: split-K over a balanced work list, then combine.

An item of the work list is a run of blocks of a sequence's context, so that long contexts are split among
many blocks of threads and short ones are not. Each (item, kv head) walks its blocks through a ring of stages
in shared memory, page by page: one TMA copy per tile of a page on sm_90, cp.async on sm_80.

    items        (a, 0-3) (a, 4-7) (b, 0-1) (c, 0-3) (c, 4-4) -        W of them, whatever the batch
    stages       | block i: wait, attend | block i+1: in flight | block i+2: in flight |

The query heads of a kv head are the M = 16 rows of mma.sync on both architectures. wgmma, on sm_90, has an M
of 64: three quarters of the softmax and of the accumulators would be padding, and its register operand does
not run in the interpreter of jax 0.11. Decode waits for memory, and by its number of instructions mma.sync
fed by ldmatrix keeps up with it. No version of this kernel has been timed yet.
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

from jax_paged.pallas_kernels import tuning
from jax_paged.pallas_kernels.combine import combine

ROWS = tuning.MAX_GROUP_SIZE


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
    tuning.check_shape(q, kv_pages, interpret=interpret)
    gpu = tuning.target(interpret=interpret)
    config = config or decode_config(gpu, q.shape, kv_pages.shape, kv_pages.dtype)
    items, spans = work_list(context_lens, config.num_items, config.block_tokens, window)
    weighted, stats = _attend(
        q, kv_pages, block_tables, context_lens, items, scale, window, soft_cap, config, gpu, interpret
    )
    return combine(
        weighted, stats, spans, num_heads=q.shape[1], dtype=q.dtype, sinks=sinks, interpret=interpret
    )


def decode_config(
    gpu: tuning.Target, q_shape: tuple[int, ...], pool_shape: tuple[int, ...], dtype: Any
) -> tuning.KernelConfig:
    """Returns tile sizes that leave room for two blocks of threads on a multiprocessor.

    Args:
        gpu: The GPU that the kernel is lowered for.
        q_shape: [B, H, D].
        pool_shape: [P, 2, K, S, D].
        dtype: Dtype of the pool.
    """
    _, _, kv_heads, page_size, head_dim = pool_shape
    token_bytes = 2 * head_dim * jnp.dtype(dtype).itemsize
    block_tokens = max(32, page_size, 1 << int(math.log2(32 * 1024 / token_bytes)))
    num_stages = min(
        4, max(2, (gpu.smem_bytes // 2 - 4096 - ROWS * head_dim * 4) // (block_tokens * token_bytes))
    )
    # With at least twice as many items as sequences no item is longer than the average context.
    num_items = q_shape[0] + max(q_shape[0], 2 * gpu.num_sms // kv_heads, 1)
    return tuning.KernelConfig(ROWS, block_tokens, num_stages, num_items, gpu.has_tma)


def work_list(
    context_lens: Int[Array, " b"], num_items: int, block_tokens: int, window: int | None
) -> tuple[Int[Array, "w 3"], Int[Array, "b 2"]]:
    """Splits the contexts of a batch into at most `num_items` runs of blocks of bounded length.

    With chunk = ceil(all blocks / (W - B)), the sum of ceil(blocks / chunk) is at most W for any batch. These
    are a few small XLA ops, equal in every layer, so a step computes them once.

    Args:
        context_lens: int32 [B].
        num_items: W, more than B.
        block_tokens: Tokens per block.
        window: Blocks before the last `window` tokens of a context are in no item; None for no window.

    Returns:
        The sequence, first block and end block (exclusive) of each item, the two equal in an unused item; and
        the first item and the number of items of each sequence.
    """
    num_seqs = context_lens.shape[0]
    seqs, item = jnp.arange(num_seqs), jnp.arange(num_items)
    start = jnp.zeros_like(context_lens)
    if window is not None:
        start = jnp.maximum(context_lens - window, 0) // block_tokens
    num_blocks = pl.cdiv(context_lens, block_tokens) - start
    chunk = jnp.maximum(pl.cdiv(num_blocks.sum(), num_items - num_seqs), 1)
    counts = pl.cdiv(num_blocks, chunk)
    ends = jnp.where(seqs <= seqs[:, None], counts, 0).sum(1)
    owner = (item[:, None] >= ends).sum(1)
    seq = jnp.minimum(owner, num_seqs - 1)
    offset = (item - (ends - counts)[seq]) * chunk
    first = jnp.where(owner < num_seqs, offset, 0)
    last = jnp.where(owner < num_seqs, jnp.minimum(offset + chunk, num_blocks[seq]), 0)
    items = jnp.stack([seq, start[seq] + first, start[seq] + last], axis=1)
    return items.astype(jnp.int32), jnp.stack([ends - counts, counts], axis=1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=range(5, 11))
def _attend(
    q: Array,
    kv_pages: Array,
    block_tables: Array,
    context_lens: Array,
    items: Int[Array, "w 3"],
    scale: float,
    window: int | None,
    soft_cap: float | None,
    config: tuning.KernelConfig,
    gpu: tuning.Target,
    interpret: bool,
) -> tuple[Float[Array, "w k g d"], Float[Array, "w k 2 r"]]:
    """Runs the kernel; combine.combine describes the results, which are undefined for unused items.

    Jitted, so that equal layers are lowered once.
    """
    (num_seqs, num_heads, head_dim), (_, _, kv_heads, page_size, _) = q.shape, kv_pages.shape
    dtype, tokens, num_stages = q.dtype, config.block_tokens, config.num_stages
    pages = tokens // page_size
    assert tokens % math.lcm(page_size, 32) == 0, config
    group = num_heads // kv_heads
    rows = q.reshape(num_seqs, kv_heads, group, head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, ROWS - group), (0, 0)))
    # The four warps share the columns, 8 each: an odd last part is computed together with columns before it.
    whole = head_dim // 32 * 32
    parts = [(0, whole)] + ([(head_dim - 32, 32)] if whole < head_dim else [])
    smem_bytes = (2 * num_stages * tokens * head_dim + ROWS * tokens) * dtype.itemsize
    smem_bytes += sum(ROWS * width * 4 for _, width in parts)
    tuning.check_smem(smem_bytes, gpu, f"paged_decode with head_dim {head_dim} and page_size {page_size}")
    lhs, rhs, out = (
        layout(dtype, m_warps=1)
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    num_items = items.shape[0]

    def body(
        q_ref,
        pool_ref,
        tables_ref,
        lens_ref,
        items_ref,
        acc_ref,
        stats_ref,
        k_smem,
        v_smem,
        p_smem,
        *rest,
    ):
        acc_smems, bars = rest[: len(parts)], rest[len(parts) :]
        item, head = lax.axis_index("item"), lax.axis_index("head")
        seq, first, last = (items_ref[item, column] for column in range(3))
        length = lens_ref[seq]
        last_page = lax.div(length - 1, jnp.int32(page_size))

        def load_page_ids(block):
            # Before the window and past the context the table may hold anything, even ids outside of the
            # pool: there the first or the last page that is attended to is loaded once more, and masked.
            columns = [jnp.minimum(block * pages + j, last_page) for j in range(pages)]
            if window is not None:
                first_page = lax.div(jnp.maximum(length - window, 0), jnp.int32(page_size))
                columns = [jnp.maximum(column, first_page) for column in columns]
            return [tables_ref[seq, column] for column in columns]

        def issue(block, page_ids):
            slot = lax.rem(block, jnp.int32(num_stages))
            for which, smem in enumerate((k_smem, v_smem)):
                for j, page in enumerate(page_ids):
                    target = smem.at[slot, pl.ds(j * page_size, page_size)]
                    barrier = bars[which].at[slot] if bars else None
                    tuning.copy_to_smem(pool_ref.at[page, which, head], target, barrier)

        def wait(block, which):
            """Waits for the keys (0) or the values (1) of a block; all copies after them may be in flight."""
            if bars:
                plgpu.barrier_wait(bars[which].at[lax.rem(block, jnp.int32(num_stages))])
            else:
                values = pages * (1 - which)
                is_last = block + (num_stages - 2) >= last
                tuning.wait_cp_async(is_last, values, values + 2 * pages * (num_stages - 2))

        def live(block, shape, dimension, layout):
            token = tuning.iota(shape, dimension, layout) + block * tokens
            return (token < length) if window is None else (token < length) & (token >= length - window)

        def attend_block(queries, block, carry, *, is_full):
            accs, largest, total, page_ids = carry
            slot, ahead = lax.rem(block, jnp.int32(num_stages)), block + (num_stages - 1)

            wait(block, 0)
            keys = plgpu.load(k_smem.at[slot].T, layout=rhs, optimized=False)
            scores = tuning.mma(zeros(tokens), queries, keys, interpret=interpret)
            if soft_cap is None:
                scores *= scale * tuning.LOG2E
            else:
                # tanh(x) = 1 - 2 / (exp(2x) + 1): the hardware's has 11 bits, of scores of up to soft_cap.
                power = jnp.exp2(scores * (2 * scale * tuning.LOG2E / soft_cap))
                scores = (1 - 2 * lax.integer_pow(power + 1, -1)) * (soft_cap * tuning.LOG2E)
            if not is_full:
                scores = jnp.where(live(block, scores.shape, 1, out), scores, tuning.MASKED_SCORE)
            new_largest = jnp.maximum(largest, scores.max(axis=1))
            decay = jnp.exp2(largest - new_largest)
            probs = jnp.exp2(scores - lax.broadcast_in_dim(new_largest, scores.shape, [0]))
            # Summed over the tokens only at the end, as that takes all four warps.
            total = total * lax.broadcast_in_dim(decay, total.shape, [0]) + probs
            p_smem[...] = probs.astype(dtype)
            # All warps meet: the weights are there, and the block before has been read, so that its stage can
            # be filled again.
            if bars:
                plgpu.commit_smem()
            wait(block, 1)

            @pl.when(ahead < last)
            def _():
                issue(ahead, page_ids)

            weights = plgpu.load(p_smem, layout=lhs, optimized=False)
            new_accs = []
            for acc, (start, width) in zip(accs, parts, strict=True):
                values = plgpu.load(v_smem.at[slot, :, pl.ds(start, width)], layout=rhs, optimized=False)
                if not is_full:  # 0 * NaN is NaN: what a dead slot holds must not reach the product
                    values = jnp.where(live(block, values.shape, 0, rhs), values, jnp.zeros_like(values))
                acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
                new_accs.append(tuning.mma(acc, weights, values, interpret=interpret))
            return new_accs, new_largest, total, load_page_ids(ahead + 1)

        def zeros(columns):
            return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), out)

        @pl.when(first < last)
        def _():
            for stage in range(num_stages - 1):

                @pl.when(first + stage < last)
                def _(stage=stage):
                    issue(first + stage, load_page_ids(first + stage))

            largest = plgpu.layout_cast(jnp.full((ROWS,), tuning.MASKED_SCORE, jnp.float32), out.reduce(1))
            page_ids = load_page_ids(first + num_stages - 1)
            carry = ([zeros(width) for _, width in parts], largest, zeros(tokens), page_ids)
            queries = plgpu.load(q_ref.at[seq, head], layout=lhs, optimized=False)
            full = functools.partial(attend_block, queries, is_full=True)
            masked = functools.partial(attend_block, queries, is_full=False)
            begin, end = first, jnp.clip(lax.div(length, jnp.int32(tokens)), first, last)
            if window is not None:
                begin = lax.div(jnp.maximum(length - window, 0) + tokens - 1, jnp.int32(tokens))
                begin = jnp.clip(begin, first, end)
                carry = lax.fori_loop(first, begin, masked, carry)
            carry = lax.fori_loop(begin, end, full, carry)
            accs, largest, total, _ = lax.fori_loop(end, last, masked, carry)
            # By way of shared memory, as the rows past the group need not go out. A buffer for each part: JAX
            # swizzles it as it likes, and writes to the wrong places of a slice that cuts the pattern.
            for acc, acc_smem in zip(accs, acc_smems, strict=True):
                tuning.store(acc_smem, acc)
            tuning.meet(config.has_tma)
            for acc_smem, (start, width) in zip(acc_smems, parts, strict=True):
                layout = tuning.row_layout(group * width)
                live_rows = plgpu.load(acc_smem.at[:group], layout=layout, optimized=False)
                tuning.store(acc_ref.at[item, head, :, pl.ds(start, width)], live_rows)
            tuning.store(stats_ref.at[item, head, 0], largest)
            tuning.store(stats_ref.at[item, head, 1], total.sum(axis=1))

    transforms = tuning.smem_transforms(head_dim, dtype, 32 if config.has_tma else page_size)
    stages = plgpu.SMEM((num_stages, tokens, head_dim), dtype, transforms=transforms)
    barrier = plgpu.Barrier(num_arrivals=pages, num_barriers=num_stages)
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_items, kv_heads, group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_items, kv_heads, 2, ROWS), jnp.float32),
        ),
        scratch_types=[
            stages,
            stages,
            plgpu.SMEM((ROWS, tokens), dtype, transforms=tuning.smem_transforms(tokens, dtype)),
            *(plgpu.SMEM((ROWS, width), jnp.float32) for _, width in parts),
            *([barrier, barrier] if config.has_tma else []),
        ],
        grid=(kv_heads, num_items),
        grid_names=("head", "item"),
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=tuning.interpret_params(interpret),
    )(rows, kv_pages, block_tables, context_lens, items)
