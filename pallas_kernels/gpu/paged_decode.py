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
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels.gpu import quantized_tile, tuning
from jax_paged.pallas_kernels.gpu.combine import combine
from jax_paged.pallas_kernels.quantization import is_quantized

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
    tuning.check_shape(q, kv_pages, interpret=interpret)
    gpu = tuning.target(interpret=interpret)
    config = config or decode_config(gpu, kv_pages.shape, kv_pages.dtype)
    work = work_list(context_lens, config.num_parts, config.block_tokens, window)
    return attend_with_stats(
        q, kv_pages, block_tables, context_lens, work, sinks, distance_bias,
        scale, window, soft_cap, config, gpu, interpret,
    )[0]  # fmt: skip


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


class Work(NamedTuple):
    """What each part does, in blocks; a block has a number in its sequence, and one among those of all.

    Args:
        parts: First sequence, end sequence (exclusive), first block and end block among those of all.
        runs: Of each sequence the first block and the end block among those of all, and their difference to
            the number in the sequence.
        spans: Of each sequence the first item and the number of items.
    """

    parts: Int[Array, "n 4"]
    runs: Int[Array, "b 3"]
    spans: Int[Array, "b 2"]


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


@functools.partial(jax.jit, static_argnums=range(7, 13))
def attend_with_stats(
    q: Float[Array, "b h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    work: Work,
    sinks: Float[Array, " h"] | None,
    distance_bias: Float[Array, "h n"] | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    config: tuning.KernelConfig,
    gpu: tuning.Target,
    interpret: bool,
) -> tuple[Float[Array, "b h d"], Float[Array, "n k 2 r"]]:
    """Runs the kernel, which finishes sequences with one item, and combine, which finishes the others.

    Jitted, so that equal layers are lowered once.
    """
    (num_seqs, num_heads, head_dim), (_, _, kv_heads, page_size, _) = q.shape, kv_pages.shape
    is_bytes = is_quantized(kv_pages)
    dtype, tokens, num_stages = q.dtype, config.block_tokens, 1 if is_bytes else config.num_stages
    has_copies = config.has_tma and not is_bytes
    pages = tokens // page_size
    assert tokens % math.lcm(page_size, 32) == 0, config
    group = num_heads // kv_heads
    rows = q.reshape(num_seqs, kv_heads, group, head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, ROWS - group), (0, 0)))
    # The four warps share the columns, 8 each: odd last ones are computed together with columns before them.
    whole = head_dim // 32 * 32
    columns = [(0, whole)] + ([(head_dim - 32, 32)] if whole < head_dim else [])
    smem_bytes = (2 * num_stages * tokens * head_dim + ROWS * tokens) * dtype.itemsize
    smem_bytes += sum(ROWS * width * 4 for _, width in columns)
    tuning.check_smem(smem_bytes, gpu, f"paged_decode with head_dim {head_dim} and page_size {page_size}")
    lhs, rhs, out = (
        layout(dtype, m_warps=1)
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    num_items = config.num_parts + num_seqs - 1
    padded_sinks = []
    if sinks is not None:
        sinks = sinks.astype(jnp.float32) * tuning.LOG2E
        padded_sinks = [jnp.pad(sinks.reshape(kv_heads, group), ((0, 0), (0, ROWS - group)))]
    biases = [] if distance_bias is None else [distance_bias.astype(jnp.float32).reshape(-1) * tuning.LOG2E]
    num_given = len(padded_sinks) + len(biases)
    out_ref = jax.new_ref(lax.empty((num_seqs, num_heads, head_dim), dtype))

    def body(q_ref, pool_ref, tables_ref, lens_ref, parts_ref, runs_ref, spans_ref, *refs):
        sinks_ref, bias_refs = refs[: len(padded_sinks)], refs[len(padded_sinks) : num_given]
        acc_ref, stats_ref, k_smem, v_smem, p_smem, *rest = refs[num_given:]
        acc_smems, bars = rest[: len(columns)], rest[len(columns) :]
        part, head = lax.axis_index("part"), lax.axis_index("head")
        first_seq, end_seq, part_begin, part_end = (parts_ref[part, column] for column in range(4))
        bytes_of = quantized_tile.Pages(pool_ref, head, page_size, head_dim, interpret)

        def issue(block, page_ids):
            slot = lax.rem(block, jnp.int32(num_stages))

            def copy(which, j, page):
                target = (k_smem, v_smem)[which].at[slot, pl.ds(j * page_size, page_size)]
                barrier = bars[which].at[slot] if bars else None
                tuning.copy_to_smem(pool_ref.at[page, which, head], target, barrier)

            def copy_share(warp):
                for start in range(0, pages, tuning.WARPS):
                    page = page_ids[start]
                    for number in range(1, tuning.WARPS):
                        page = jnp.where(warp == number, page_ids[start + number], page)
                    for which in range(2):
                        copy(which, start + warp, page)

            if bars and pages % tuning.WARPS == 0:
                plgpu.warp_map(copy_share)
            else:
                for which, (j, page) in itertools.product(range(2), enumerate(page_ids)):
                    copy(which, j, page)

        def zeros(width):
            return plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), out)

        def attend(seq, first, last):
            """Attends to the blocks of a sequence from `first` to `last`."""
            length = lens_ref[seq]
            last_page = lax.div(length - 1, jnp.int32(page_size))

            def load_page_ids(block):
                # Before the window and past the context the table may hold anything, even ids outside of the
                # pool: there the first or the last page that is attended to is loaded once more, and masked.
                wanted = [jnp.minimum(block * pages + j, last_page) for j in range(pages)]
                if window is not None:
                    first_page = lax.div(jnp.maximum(length - window, 0), jnp.int32(page_size))
                    wanted = [jnp.maximum(page, first_page) for page in wanted]
                return [tables_ref[seq, page] for page in wanted]

            def unpack(block, ahead):
                """Writes a block's numbers to shared memory; the warps meet after the values of the last."""
                page_ids, *tiles = ahead
                for which, ref in enumerate((k_smem, v_smem)):
                    tiles[which] = bytes_of.advance(ref.at[0], which, tiles[which], page_ids)
                    if which == 0:
                        tuning.meet(config.has_tma)
                return load_page_ids(block + 2), *tiles

            def wait(block, which):
                """Waits for the keys (0) or the values (1) of a block, and not for later copies."""
                if is_bytes:
                    if which == 1 and not config.has_tma:
                        tuning.meet(config.has_tma)
                elif bars:
                    plgpu.barrier_wait(bars[which].at[lax.rem(block, jnp.int32(num_stages))])
                else:
                    values = pages * (1 - which)
                    is_last = block + (num_stages - 2) >= last
                    tuning.wait_cp_async(is_last, values, values + 2 * pages * (num_stages - 2))

            def bias(block, table_ref):
                """Returns what is added to the scores of a block."""
                bias_len = table_ref.shape[0] // num_heads
                row = jnp.minimum(tuning.iota((ROWS, tokens), 0, out), group - 1) + head * group
                token = tuning.iota((ROWS, tokens), 1, out) + block * tokens
                index = row * bias_len + jnp.clip(length - 1 - token, 0, bias_len - 1)
                return tuning.look_up(table_ref, index, out, interpret=interpret)

            def live(block, shape, dimension, layout):
                token = tuning.iota(shape, dimension, layout) + block * tokens
                is_live = token < length
                return is_live if window is None else is_live & (token >= length - window)

            def attend_block(queries, block, carry, *, is_full):
                accs, largest, total, *bytes_ahead = carry
                slot, ahead = lax.rem(block, jnp.int32(num_stages)), block + (num_stages - 1)
                page_ids = [] if is_bytes else load_page_ids(ahead)  # which takes as long as the scores do
                bytes_ahead = [unpack(block, x) for x in bytes_ahead]
                wait(block, 0)
                keys = plgpu.load(k_smem.at[slot].T, layout=rhs, optimized=False)
                scores = tuning.mma(zeros(tokens), queries, keys, interpret=interpret)
                if soft_cap is None:
                    scores *= scale * tuning.LOG2E
                else:
                    # tanh(x) = 1 - 2 / (exp(2x) + 1): the hardware's has 11 bits, of up to soft_cap.
                    power = jnp.exp2(scores * (2 * scale * tuning.LOG2E / soft_cap))
                    scores = (1 - 2 * lax.integer_pow(power + 1, -1)) * (soft_cap * tuning.LOG2E)
                for table_ref in bias_refs:
                    scores += bias(block, table_ref)
                if not is_full:
                    scores = jnp.where(live(block, scores.shape, 1, out), scores, tuning.MASKED_SCORE)
                new_largest = jnp.maximum(largest, scores.max(axis=1))
                decay = jnp.exp2(largest - new_largest)
                probs = jnp.exp2(scores - lax.broadcast_in_dim(new_largest, scores.shape, [0]))
                # Summed over the tokens only at the end, as that takes all four warps.
                total = total * lax.broadcast_in_dim(decay, total.shape, [0]) + probs
                p_smem[...] = probs.astype(dtype)
                # All warps meet: the weights are there, and the block before has been read, so that its
                # stage can be filled. Below sm_90 they meet where they wait for the values.
                if config.has_tma:
                    plgpu.commit_smem()
                wait(block, 1)
                if not is_bytes:
                    pl.when(ahead < last)(functools.partial(issue, ahead, page_ids))
                weights = plgpu.load(p_smem, layout=lhs, optimized=False)
                new_accs = []
                for acc, (start, width) in zip(accs, columns, strict=True):
                    values = plgpu.load(v_smem.at[slot, :, pl.ds(start, width)], layout=rhs, optimized=False)
                    if not is_full:  # 0 * NaN is NaN: what a dead slot holds must not reach the product
                        values = jnp.where(live(block, values.shape, 0, rhs), values, jnp.zeros_like(values))
                    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
                    new_accs.append(tuning.mma(acc, weights, values, interpret=interpret))
                return new_accs, new_largest, total, *bytes_ahead

            for stage in range(num_stages - 1):

                @pl.when(first + stage < last)
                def _(stage=stage):
                    issue(first + stage, load_page_ids(first + stage))

            largest = plgpu.layout_cast(jnp.full((ROWS,), tuning.MASKED_SCORE, jnp.float32), out.reduce(1))
            carry = ([zeros(width) for _, width in columns], largest, zeros(tokens))
            if is_bytes:
                carry += (bytes_of.begin(load_page_ids(first), load_page_ids(first + 1)),)
            queries = plgpu.load(q_ref.at[seq, head], layout=lhs, optimized=False)
            full = functools.partial(attend_block, queries, is_full=True)
            masked = functools.partial(attend_block, queries, is_full=False)
            begin, end = first, jnp.clip(lax.div(length, jnp.int32(tokens)), first, last)
            if window is not None:
                begin = lax.div(jnp.maximum(length - window, 0) + tokens - 1, jnp.int32(tokens))
                begin = jnp.clip(begin, first, end)
                carry = lax.fori_loop(first, begin, masked, carry)
            carry = lax.fori_loop(begin, end, full, carry)
            accs, largest, total, *_ = lax.fori_loop(end, last, masked, carry)

            is_only_item = spans_ref[seq, 1] == 1
            total = total.sum(axis=1)
            for ref in sinks_ref:  # with more items combine adds the sink, and -inf is none
                sink = plgpu.load(ref.at[head], layout=out.reduce(1), optimized=False)
                total += jnp.exp2(sink + jnp.where(is_only_item, 0.0, -jnp.inf) - largest)
            factor = lax.integer_pow(total, -1)
            # By way of shared memory, as the rows past the group need not go out. A buffer for each run of
            # columns: JAX swizzles it as it likes, and writes to the wrong places of a slice that cuts the
            # pattern.
            for acc, acc_smem in zip(accs, acc_smems, strict=True):
                tuning.store(acc_smem, acc * lax.broadcast_in_dim(factor, acc.shape, [0]))
            tuning.meet(config.has_tma)

            def write(target):
                for acc_smem, (start, width) in zip(acc_smems, columns, strict=True):
                    layout = tuning.row_layout(group * width)
                    rows = plgpu.load(acc_smem.at[:group], layout=layout, optimized=False)
                    tuning.store(target.at[:, pl.ds(start, width)], rows.astype(target.dtype))

            item = part + seq
            pl.when(is_only_item)(lambda: write(out_ref.at[seq, pl.ds(head * group, group)]))
            pl.when(jnp.logical_not(is_only_item))(lambda: write(acc_ref.at[item, head]))
            tuning.store(stats_ref.at[item, head, 0], largest)
            tuning.store(stats_ref.at[item, head, 1], total)

        @pl.loop(first_seq, end_seq)
        def _(seq):
            run_begin, run_end, offset = (runs_ref[seq, column] for column in range(3))
            first = jnp.maximum(part_begin, run_begin) - offset
            last = jnp.minimum(part_end, run_end) - offset
            pl.when(first < last)(functools.partial(attend, seq, first, last))

    transforms = tuning.smem_transforms(head_dim, dtype, 32 if config.has_tma or is_bytes else page_size)
    stages = plgpu.SMEM((num_stages, tokens, head_dim), dtype, transforms=transforms)
    barrier = plgpu.Barrier(num_arrivals=pages, num_barriers=num_stages)
    items = plgpu.kernel(
        body,
        out_type=(
            # Three more than there are, as combine loads four at a time.
            jax.ShapeDtypeStruct((num_items + 3, kv_heads, group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_items + 3, kv_heads, 2, ROWS), jnp.float32),
        ),
        scratch_types=[
            stages,
            stages,
            plgpu.SMEM((ROWS, tokens), dtype, transforms=tuning.smem_transforms(tokens, dtype)),
            *(plgpu.SMEM((ROWS, width), jnp.float32) for _, width in columns),
            *([barrier, barrier] if has_copies else []),
        ],
        # The heads of a part run next to each other: a page holds all of them.
        grid=(config.num_parts, kv_heads),
        grid_names=("part", "head"),
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=tuning.interpret_params(interpret),
    )(
        rows, quantized_tile.flat(kv_pages) if is_bytes else kv_pages, block_tables, context_lens,
        *work, *padded_sinks, *biases,
    )  # fmt: skip
    combine(*items, work.spans, sinks, out_ref, interpret=interpret)
    return jax.freeze(out_ref), items[1]
