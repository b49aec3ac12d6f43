"""One item of the paged_decode kernel: the loop over some blocks of one sequence, for one kv head.

The module docstring of paged_decode.py describes the kernel as a whole.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from jax_paged.pallas_kernels.gpu import quantized_tile, tuning

ROWS = tuning.MAX_GROUP_SIZE
# Index of the keys, and of the values, in the second dimension of the pool.
KEYS, VALUES = 0, 1


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Static shape and options of a paged_decode kernel.

    Args:
        config: Tile sizes.
        num_heads: Number of query heads.
        kv_heads: Number of kv heads.
        head_dim: Elements of a head.
        page_size: Tokens per page.
        dtype: Dtype of the queries.
        is_quantized: Whether the pool stores one byte per number.
        scale: Factor of the scores.
        window: Sliding window (tokens); None for none.
        soft_cap: Soft cap of the scores; None for none.
        interpret: Whether the kernel runs in the interpreter.
    """

    config: tuning.KernelConfig
    num_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: Any
    is_quantized: bool
    scale: float
    window: int | None
    soft_cap: float | None
    interpret: bool

    @property
    def group(self) -> int:
        """The number of query heads per kv head."""
        return self.num_heads // self.kv_heads

    @property
    def tokens(self) -> int:
        """The number of tokens per block."""
        return self.config.block_tokens

    @property
    def pages(self) -> int:
        """The number of pages per block."""
        return self.tokens // self.page_size

    @property
    def num_stages(self) -> int:
        """The number of stages in shared memory.

        A quantized pool has only one, because registers hold the blocks that are loaded ahead.
        """
        return 1 if self.is_quantized else self.config.num_stages

    @property
    def has_barriers(self) -> bool:
        """Whether pages are copied by TMA, whose copies arrive at a barrier."""
        return self.config.has_tma and not self.is_quantized

    @property
    def column_ranges(self) -> list[tuple[int, int]]:
        """The (start, width) of the column ranges in which values are multiplied.

        The width is a multiple of 32 because each of the four warps computes 8 columns at a time. If head_dim
        is not a multiple of 32, a second range covers its last 32 columns. Columns in both ranges are
        computed twice.
        """
        even = self.head_dim // 32 * 32
        return [(0, even)] + ([(self.head_dim - 32, 32)] if even < self.head_dim else [])

    @property
    def smem_bytes(self) -> int:
        """The shared memory of keys, values, probabilities and results (bytes), without barriers."""
        stages = (
            2 * self.num_stages * self.tokens * self.head_dim + ROWS * self.tokens
        ) * self.dtype.itemsize
        return stages + sum(ROWS * width * 4 for _, width in self.column_ranges)

    @property
    def lhs(self) -> Any:
        """The layout of the left operand of mma.sync."""
        return plgpu.Layout.MMA_LHS(self.dtype, m_warps=1)

    @property
    def rhs(self) -> Any:
        """The layout of the right operand of mma.sync."""
        return plgpu.Layout.MMA_RHS(self.dtype, m_warps=1)

    @property
    def acc(self) -> Any:
        """The layout of the accumulator of mma.sync."""
        return plgpu.Layout.MMA_ACC(self.dtype, m_warps=1)

    def zeros(self, width: int) -> Array:
        """Returns an accumulator [ROWS, width] of zeros."""
        return plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), self.acc)

    def stage(self, block: Array) -> Array:
        """Returns the stage that holds a block."""
        return lax.rem(block, jnp.int32(self.num_stages))


class Work(NamedTuple):
    """Work list of the kernel, in blocks.

    A block has a local index within its sequence and a global index among the blocks of all sequences.

    Args:
        parts: Per part: first sequence, end sequence (exclusive), first and end block (global indices).
        seq_ranges: Per sequence: first and end block (global indices), and global index minus local index.
        item_ranges: Per sequence: first item and number of items.
    """

    parts: Int[Array, "n 4"]
    seq_ranges: Int[Array, "b 3"]
    item_ranges: Int[Array, "b 2"]


class Refs(NamedTuple):
    """References of the kernel: operands, results and shared memory.

    Args:
        q: [B, K, ROWS, D].
        pool: [P, 2, K, S, D], or the result of quantized_tile.flat for a quantized pool.
        tables: int32 [B, M], block tables.
        lens: int32 [B], context lengths.
        work: The work list.
        sinks: float32 [K, ROWS] in base 2; None without sinks.
        bias: float32 [H * n] in base 2; None without a distance bias.
        out: [B, H, D], the results of sequences with a single item.
        partial_outputs: float32 [items, K, G, D], the normalized results of the other items.
        stats: float32 [items, K, 2, ROWS], the maximum score (base 2) and the denominator of each item.
        keys: [stages, tokens, D] in shared memory.
        values: [stages, tokens, D] in shared memory.
        probs: [ROWS, tokens] in shared memory.
        results: [ROWS, width] in shared memory, for each range of DecodeShape.column_ranges.
        barriers: Two barriers per stage, for keys and values; empty without TMA.
    """

    q: Any
    pool: Any
    tables: Any
    lens: Any
    work: Any
    sinks: Any
    bias: Any
    out: Any
    partial_outputs: Any
    stats: Any
    keys: Any
    values: Any
    probs: Any
    results: tuple[Any, ...]
    barriers: tuple[Any, ...]


class Softmax(NamedTuple):
    """State of the online softmax of an item, in registers.

    Args:
        accs: float32 [ROWS, width] for each range of DecodeShape.column_ranges: sum of probabilities times
            values.
        largest: float32 [ROWS], the largest score so far, in base 2.
        total: float32 [ROWS, tokens], the probabilities summed over the blocks, but not yet over the tokens.
        loaded: Pages that quantized_tile.Pages has loaded ahead; None unless the pool is quantized.
    """

    accs: list[Array]
    largest: Array
    total: Array
    loaded: Any


@dataclasses.dataclass(frozen=True)
class Item:
    """Blocks `first` to `end` (exclusive) of one sequence, for one kv head.

    Args:
        shape: Static shape of the kernel.
        refs: References of the kernel.
        part: The part that the item belongs to.
        head: The kv head.
        seq: The sequence.
        first: First block, as an index within the sequence.
        end: End block (exclusive), as an index within the sequence.
        length: Context length of the sequence (tokens).
        last_page: Index of the last page of the sequence.
    """

    shape: DecodeShape
    refs: Refs
    part: Array
    head: Array
    seq: Array
    first: Array
    end: Array
    length: Array
    last_page: Array

    @property
    def quantized_pages(self) -> quantized_tile.Pages:
        """The pages of the kv head in a quantized pool."""
        shape = self.shape
        return quantized_tile.Pages(
            self.refs.pool, self.head, shape.page_size, shape.head_dim, shape.interpret
        )

    def attend(self) -> None:
        """Computes the item: the loop over its blocks, and the result.

        Only blocks that cross the end of the context or the start of the window are masked. They have loops
        of their own.
        """
        shape, first, end = self.shape, self.first, self.end
        for stage in range(shape.num_stages - 1):

            @pl.when(first + stage < end)
            def _(stage=stage):
                self.start_copies(first + stage, self.page_ids(first + stage))

        largest = jnp.full((ROWS,), tuning.MASKED_SCORE, jnp.float32)
        largest = plgpu.layout_cast(largest, shape.acc.reduce(1))
        softmax = Softmax(
            [shape.zeros(width) for _, width in shape.column_ranges], largest, shape.zeros(shape.tokens), None
        )
        if shape.is_quantized:
            loaded = self.quantized_pages.begin(self.page_ids(first), self.page_ids(first + 1))
            softmax = softmax._replace(loaded=loaded)
        queries = plgpu.load(self.refs.q.at[self.seq, self.head], layout=shape.lhs, optimized=False)
        full = functools.partial(self.attend_block, queries, is_full=True)
        masked = functools.partial(self.attend_block, queries, is_full=False)
        full_begin, full_end = first, jnp.clip(lax.div(self.length, jnp.int32(shape.tokens)), first, end)
        if shape.window is not None:
            full_begin = jnp.maximum(self.length - shape.window, 0) + shape.tokens - 1
            full_begin = jnp.clip(lax.div(full_begin, jnp.int32(shape.tokens)), first, full_end)
            softmax = lax.fori_loop(first, full_begin, masked, softmax)
        softmax = lax.fori_loop(full_begin, full_end, full, softmax)
        self.write(lax.fori_loop(full_end, end, masked, softmax))

    def attend_block(self, queries: Array, block: Array, softmax: Softmax, *, is_full: bool) -> Softmax:
        """Adds one block to the softmax state, while later blocks are being copied.

        Args:
            queries: [ROWS, D] in registers.
            block: The block, as an index within the sequence.
            softmax: The state before the block.
            is_full: Whether all tokens of the block are attended to, so that no mask is needed.

        Returns:
            The state after the block.
        """
        shape, refs = self.shape, self.refs
        stage, ahead = shape.stage(block), block + (shape.num_stages - 1)
        loaded, page_ids = None, []
        if shape.is_quantized:
            loaded = self.unpack(block, softmax.loaded)
        else:
            # Loading the page ids takes as long as computing the scores. Started here, the load overlaps with
            # them.
            page_ids = self.page_ids(ahead)
        self.wait(block, KEYS)
        scores = self.scores(queries, block, stage)
        if not is_full:
            scores = jnp.where(self.is_live(block, scores.shape, 1, shape.acc), scores, tuning.MASKED_SCORE)
        largest = jnp.maximum(softmax.largest, scores.max(axis=1))
        decay = jnp.exp2(softmax.largest - largest)
        probs = jnp.exp2(scores - lax.broadcast_in_dim(largest, scores.shape, [0]))
        # The sum over the tokens is deferred to the end because it is a reduction over all four warps.
        total = softmax.total * lax.broadcast_in_dim(decay, softmax.total.shape, [0]) + probs
        refs.probs[...] = probs.astype(shape.dtype)
        # After this barrier the probabilities are visible to all warps, and all warps have read the previous
        # block, so that its stage can be overwritten. Without TMA, the wait for the values contains the
        # barrier.
        if shape.config.has_tma:
            plgpu.commit_smem()
        self.wait(block, VALUES)
        if not shape.is_quantized:
            pl.when(ahead < self.end)(functools.partial(self.start_copies, ahead, page_ids))
        accs = self.accumulate(softmax.accs, decay, block, stage, is_full=is_full)
        return Softmax(accs, largest, total, loaded)

    def page_ids(self, block: Array) -> list[Array]:
        """Loads the page ids of a block from the block table.

        Table entries before the window and past the context may be invalid, even outside of the pool. In
        their place, the id of the first or the last valid page is used. The scores of these tokens are
        masked.
        """
        shape = self.shape
        columns = [jnp.minimum(block * shape.pages + j, self.last_page) for j in range(shape.pages)]
        if shape.window is not None:
            first_page = lax.div(jnp.maximum(self.length - shape.window, 0), jnp.int32(shape.page_size))
            columns = [jnp.maximum(column, first_page) for column in columns]
        return [self.refs.tables[self.seq, column] for column in columns]

    def start_copies(self, block: Array, page_ids: list[Array]) -> None:
        """Starts the copies of a block's pages to its stage. With TMA, each warp starts a share of them."""
        shape, refs = self.shape, self.refs
        stage = shape.stage(block)

        def copy(which: int, index: Any, page: Array) -> None:
            rows = pl.ds(index * shape.page_size, shape.page_size)
            target = (refs.keys, refs.values)[which].at[stage, rows]
            barrier = refs.barriers[which].at[stage] if refs.barriers else None
            tuning.copy_to_smem(refs.pool.at[page, which, self.head], target, barrier)

        def copy_share(warp: Array) -> None:
            for start in range(0, shape.pages, tuning.WARPS):
                page = page_ids[start]
                for number in range(1, tuning.WARPS):
                    page = jnp.where(warp == number, page_ids[start + number], page)
                for which in (KEYS, VALUES):
                    copy(which, start + warp, page)

        if refs.barriers and shape.pages % tuning.WARPS == 0:
            plgpu.warp_map(copy_share)
        else:
            for which, (index, page) in itertools.product((KEYS, VALUES), enumerate(page_ids)):
                copy(which, index, page)

    def unpack(self, block: Array, loaded: Any) -> Any:
        """Writes a block of a quantized pool to shared memory and starts to load the next one.

        After the barrier that follows the keys, all warps can read them. All warps have then also read the
        values of the previous block, so that these can be overwritten.
        """
        page_ids, *tiles = loaded
        for which, ref in ((KEYS, self.refs.keys), (VALUES, self.refs.values)):
            tiles[which] = self.quantized_pages.advance(ref.at[0], which, tiles[which], page_ids)
            if which == KEYS:
                tuning.sync_warps(self.shape.config.has_tma)
        return self.page_ids(block + 2), *tiles

    def wait(self, block: Array, which: int) -> None:
        """Waits for the keys or the values of a block, but not for copies that were started later."""
        shape = self.shape
        if shape.is_quantized:
            if which == VALUES and not shape.config.has_tma:
                tuning.sync_warps(shape.config.has_tma)
        elif self.refs.barriers:
            plgpu.barrier_wait(self.refs.barriers[which].at[shape.stage(block)])
        else:
            # The copies that may stay in flight: the values of this block, and all copies of later blocks.
            in_flight = shape.pages if which == KEYS else 0
            is_last = block + (shape.num_stages - 2) >= self.end
            tuning.wait_cp_async(is_last, in_flight, in_flight + 2 * shape.pages * (shape.num_stages - 2))

    def is_live(self, block: Array, mask_shape: tuple[int, ...], dimension: int, layout: Any) -> Array:
        """Returns a mask of the tokens of a block that the query attends to.

        Args:
            block: The block, as an index within the sequence.
            mask_shape: Shape of the mask.
            dimension: The dimension of the mask that counts the tokens.
            layout: Register layout of the mask.
        """
        token = tuning.iota(mask_shape, dimension, layout) + block * self.shape.tokens
        is_live = token < self.length
        window = self.shape.window
        return is_live if window is None else is_live & (token >= self.length - window)

    def scores(self, queries: Array, block: Array, stage: Array) -> Array:
        """Returns the scores of a block, [ROWS, tokens] in base 2."""
        shape, scale = self.shape, self.shape.scale
        keys = plgpu.load(self.refs.keys.at[stage].T, layout=shape.rhs, optimized=False)
        scores = tuning.mma(shape.zeros(shape.tokens), queries, keys, interpret=shape.interpret)
        if shape.soft_cap is None:
            scores *= scale * tuning.LOG2E
        else:
            # tanh(x) = 1 - 2 / (exp(2x) + 1). The hardware instruction for tanh is accurate to 11 bits only.
            power = jnp.exp2(scores * (2 * scale * tuning.LOG2E / shape.soft_cap))
            scores = (1 - 2 * lax.integer_pow(power + 1, -1)) * (shape.soft_cap * tuning.LOG2E)
        return scores if self.refs.bias is None else scores + self.bias(block)

    def bias(self, block: Array) -> Array:
        """Returns the distance bias of a block, [ROWS, tokens] in base 2."""
        shape, table = self.shape, self.refs.bias
        bias_len = table.shape[0] // shape.num_heads
        row = jnp.minimum(tuning.iota((ROWS, shape.tokens), 0, shape.acc), shape.group - 1)
        row += self.head * shape.group
        token = tuning.iota((ROWS, shape.tokens), 1, shape.acc) + block * shape.tokens
        index = row * bias_len + jnp.clip(self.length - 1 - token, 0, bias_len - 1)
        return tuning.gather_table(table, index, shape.acc, interpret=shape.interpret)

    def accumulate(
        self, accs: list[Array], decay: Array, block: Array, stage: Array, *, is_full: bool
    ) -> list[Array]:
        """Returns the accumulators, rescaled by `decay`, plus a block's probabilities times its values."""
        shape, new_accs = self.shape, []
        probs = plgpu.load(self.refs.probs, layout=shape.lhs, optimized=False)
        for acc, (start, width) in zip(accs, shape.column_ranges, strict=True):
            part = self.refs.values.at[stage, :, pl.ds(start, width)]
            values = plgpu.load(part, layout=shape.rhs, optimized=False)
            # The values in dead slots are replaced by 0 because they may be NaN, and 0 * NaN is NaN.
            if not is_full:
                is_live = self.is_live(block, values.shape, 0, shape.rhs)
                values = jnp.where(is_live, values, jnp.zeros_like(values))
            acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
            new_accs.append(tuning.mma(acc, probs, values, interpret=shape.interpret))
        return new_accs

    def write(self, softmax: Softmax) -> None:
        """Writes the normalized result and the statistics of the item.

        The result goes to `out` if it is the only item of the sequence, otherwise to `partial_outputs`.
        """
        shape, refs = self.shape, self.refs
        is_only_item = refs.work.item_ranges[self.seq, 1] == 1
        total = softmax.total.sum(axis=1)
        # If the sequence has several items, `combine` adds the sink, and here exp2(-inf) adds 0.
        if refs.sinks is not None:
            sink = plgpu.load(refs.sinks.at[self.head], layout=shape.acc.reduce(1), optimized=False)
            total += jnp.exp2(sink + jnp.where(is_only_item, 0.0, -jnp.inf) - softmax.largest)
        factor = lax.integer_pow(total, -1)
        # The result goes through shared memory because the rows that pad the group to 16 must not be written.
        # Each column range has a buffer of its own. JAX swizzles buffers, and if a slice cuts the swizzle
        # pattern, JAX writes to wrong addresses.
        for acc, result in zip(softmax.accs, refs.results, strict=True):
            tuning.store(result, acc * lax.broadcast_in_dim(factor, acc.shape, [0]))
        tuning.sync_warps(shape.config.has_tma)
        item, head, group = self.part + self.seq, self.head, shape.group
        pl.when(is_only_item)(lambda: self.write_rows(refs.out.at[self.seq, pl.ds(head * group, group)]))
        pl.when(jnp.logical_not(is_only_item))(lambda: self.write_rows(refs.partial_outputs.at[item, head]))
        tuning.store(refs.stats.at[item, head, 0], softmax.largest)
        tuning.store(refs.stats.at[item, head, 1], total)

    def write_rows(self, target: Any) -> None:
        """Copies the rows of the query heads from shared memory to `target`, [G, D]."""
        group = self.shape.group
        for result, (start, width) in zip(self.refs.results, self.shape.column_ranges, strict=True):
            rows = plgpu.load(result.at[:group], layout=tuning.row_layout(group * width), optimized=False)
            tuning.store(target.at[:, pl.ds(start, width)], rows.astype(target.dtype))
