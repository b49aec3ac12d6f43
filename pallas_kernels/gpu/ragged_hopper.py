"""The ragged attention kernel for Hopper (sm_90), with warp specialization, TMA and wgmma.

ragged_prefill.py describes the tiles and the grid. A thread block consists of one copying warpgroup
(`Copier`) and one or two multiplying warpgroups (`Multiplier`) with 64 rows of the tile each. The multiplying
warpgroups share keys and values.

Memory:

- Global memory: tiles of queries, pool, block tables, list of tiles, and tiles of output.
- Shared memory: the queries of the tile, which the output replaces at the end, and a ring of `num_stages`
  stages with the keys and values of one step each.
- Registers: scores, probabilities, float32 accumulator, running maximum and sum. The probabilities stay in
  registers, as the left operand of wgmma.

Each stage has two barriers for the keys and two for the values: "loaded" means that the copies into the stage
are complete, and "free" means that all multiplying warpgroups have read it.

The copying warpgroup copies the queries, and then for each step:

1. Waits until the stage is free, unless it is used for the first time.
2. Starts one TMA copy per page, for the keys and then for the values, which arrive at "loaded". If the pool
   is quantized, it dequantizes the pages through registers instead (quantized_tile.py).

Each multiplying warpgroup, for each step:

1. If the step may have dead slots, waits for the values. The first multiplying warpgroup then clears the
   values of dead slots.
2. Waits for the keys, multiplies its queries by them, and arrives at "free" of the keys.
3. Masks the scores if the step is not full, and updates the online softmax.
4. Waits for the values, multiplies the probabilities by them, accumulates, and arrives at "free" of the
   values.

After the last step it divides by the denominator and writes the output by TMA, through shared memory.

Source: Shah et al., FlashAttention-3, 2024.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jax_paged.pallas_kernels.gpu import quantized_tile, ragged_tile, tuning
from jax_paged.pallas_kernels.gpu.ragged_tile import WGMMA_ROWS, Carry, PrefillShape, Tile

ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
WGMMA = plgpu.Layout.WGMMA


class Refs(NamedTuple):
    """References of the kernel: operands, results, shared memory and barriers.

    Args:
        tiles: int32 [tiles, 4], the list of tiles, one Tile per row.
        q: [tiles, K, rows, D].
        pool: [P, 2, K, S, D], or the result of quantized_tile.flat for a quantized pool.
        tables: int32 [B, M], block tables.
        sinks: float32 [K, rows] in base 2; None without sinks.
        bias: float32 [H * n] in base 2; None without a distance bias.
        out: [tiles, K, rows, D].
        queries: Shared memory [warpgroups, WGMMA_ROWS, D], the queries of each multiplying warpgroup.
        keys: Shared memory [stages, tokens, D].
        values: Shared memory [stages, tokens, D].
        probs: Shared memory [warpgroups, WGMMA_ROWS, tokens], in the interpreter only; otherwise None.
        queries_loaded: Barrier for the queries.
        keys_loaded: One barrier per stage: its keys are loaded.
        values_loaded: One barrier per stage: its values are loaded.
        keys_free: One barrier per stage: all multiplying warpgroups have read its keys.
        values_free: One barrier per stage: all multiplying warpgroups have read its values.
        values_cleared: Barrier at which the second multiplying warpgroup waits until the first has cleared
            dead values; None with one multiplying warpgroup.
    """

    tiles: Any
    q: Any
    pool: Any
    tables: Any
    sinks: Any
    bias: Any
    out: Any
    queries: Any
    keys: Any
    values: Any
    probs: Any
    queries_loaded: Any
    keys_loaded: Any
    values_loaded: Any
    keys_free: Any
    values_free: Any
    values_cleared: Any

    def stages(self) -> enumerate[tuple[Any, Any, Any]]:
        """Returns an enumeration of (buffer, barrier "loaded", barrier "free"): keys (0) and values (1)."""
        keys = self.keys, self.keys_loaded, self.keys_free
        return enumerate((keys, (self.values, self.values_loaded, self.values_free)))


def wgmma_kernel(shape: PrefillShape) -> Callable[..., Array]:
    """Returns the kernel. It takes tiles of queries and the pool, and returns tiles of attention output."""
    tokens, num_stages, num_computing = (
        shape.config.block_tokens,
        shape.config.num_stages,
        shape.num_computing,
    )

    def body(*args):
        refs = Refs(*args)
        head, index, tile = ragged_tile.current_tile(shape, refs.tiles)
        begin, *_middle, end = ragged_tile.step_ranges(shape, tile)
        copier = Copier(shape, refs, head, index, tile, begin, end, jnp.minimum(begin + 1, end - 1))
        warpgroup = lax.axis_index("warpgroup")
        pl.when((warpgroup == num_computing) & (end > begin))(copier.copy)
        multiplier = Multiplier(shape, refs, head, index, tile, warpgroup)
        pl.when((warpgroup < num_computing) & (end > begin))(multiplier.attend)

    transforms = tuning.smem_transforms(shape.head_dim, shape.dtype)
    stages = plgpu.SMEM((num_stages, tokens, shape.head_dim), shape.dtype, transforms=transforms)
    arrivals = 1 if shape.is_quantized else tokens // shape.page_size
    loaded = plgpu.Barrier(num_arrivals=arrivals, num_barriers=num_stages)
    free = plgpu.Barrier(num_arrivals=num_computing, num_barriers=num_stages)
    scratch_types = [
        plgpu.SMEM((num_computing, WGMMA_ROWS, shape.head_dim), shape.dtype, transforms=transforms),
        stages,
        stages,
        plgpu.SMEM((num_computing, WGMMA_ROWS, tokens), shape.dtype) if shape.interpret else None,
        plgpu.Barrier(num_arrivals=num_computing),
        *(loaded, loaded, free, free),
        plgpu.Barrier(num_arrivals=num_computing) if num_computing > 1 else None,
    ]
    return ragged_tile.make_kernel(
        shape, body, scratch_types, num_threads=num_computing + 1, thread_name="warpgroup"
    )


@dataclasses.dataclass(frozen=True)
class Copier:
    """The warpgroup that copies queries, keys and values to shared memory.

    Args:
        shape: Static shape of the kernel.
        refs: References of the kernel.
        head: The kv head.
        index: Index of the tile.
        tile: The tile.
        begin: First step.
        end: End step (exclusive).
        second: The step after the first one, or the first one if it is the only step.
    """

    shape: PrefillShape
    refs: Refs
    head: Array
    index: Array
    tile: Tile
    begin: Array
    end: Array
    second: Array

    def copy(self) -> None:
        """Copies the queries, and then the keys and values of all steps."""
        shape, refs, begin, end = self.shape, self.refs, self.begin, self.end
        for i in range(shape.num_computing):
            rows = pl.ds(i * WGMMA_ROWS, WGMMA_ROWS)
            plgpu.copy_gmem_to_smem(
                refs.q.at[self.index, self.head, rows], refs.queries.at[i], refs.queries_loaded
            )
        if shape.is_quantized:
            loaded = self.quantized_pages.begin(self.page_ids(begin), self.page_ids(self.second))
            lax.fori_loop(begin, end, self.unpack_step, loaded)
        else:
            pl.loop(begin, end)(self.copy_step)

        @pl.loop(jnp.maximum(begin, end - shape.config.num_stages), end)
        def _(step):  # wait for all arrivals before the kernel ends
            for free in (refs.keys_free, refs.values_free):
                plgpu.barrier_wait(free.at[shape.stage(step)])

    @property
    def quantized_pages(self) -> quantized_tile.Pages:
        """The pages of the kv head in a quantized pool."""
        shape = self.shape
        return quantized_tile.Pages(
            self.refs.pool, self.head, shape.page_size, shape.head_dim, shape.interpret
        )

    def page_ids(self, step: Array) -> list[Array]:
        """Loads the page ids of a step."""
        return ragged_tile.pages_of(self.shape, self.tile, self.refs.tables, step)

    def wait_for_free(self, step: Array, stage: Any) -> None:
        """Waits until the stage of a step has been read. The first use of a stage needs no wait.

        Args:
            step: The step.
            stage: The "free" barrier of the stage.
        """
        is_reused = step - self.begin >= self.shape.config.num_stages
        pl.when(is_reused)(lambda: plgpu.barrier_wait(stage))

    def copy_step(self, step: Array) -> None:
        """Starts the copies of the keys and values of a step."""
        slot, page_size = self.shape.stage(step), self.shape.page_size
        page_ids = self.page_ids(step)
        for which, (ref, loaded, free) in self.refs.stages():
            self.wait_for_free(step, free.at[slot])
            for i, page in enumerate(page_ids):
                target = ref.at[slot, pl.ds(i * page_size, page_size)]
                plgpu.copy_gmem_to_smem(self.refs.pool.at[page, which, self.head], target, loaded.at[slot])

    def unpack_step(self, step: Array, ahead: Any) -> Any:
        """Writes a step of a quantized pool to its stage, and loads the next step into registers.

        Args:
            step: The step.
            ahead: Page ids of the next step, and the keys and values of this step, in registers.

        Returns:
            The same for the next step.
        """
        slot, (page_ids, *tiles) = self.shape.stage(step), ahead
        for which, (ref, loaded, free) in self.refs.stages():
            self.wait_for_free(step, free.at[slot])
            tiles[which] = self.quantized_pages.advance(ref.at[slot], which, tiles[which], page_ids)
            plgpu.commit_smem()
            plgpu.barrier_arrive(loaded.at[slot])
        return self.page_ids(jnp.minimum(step + 2, self.end - 1)), *tiles


@dataclasses.dataclass(frozen=True)
class Multiplier:
    """A warpgroup that multiplies WGMMA_ROWS rows of a tile.

    Args:
        shape: Static shape of the kernel.
        refs: References of the kernel.
        head: The kv head.
        index: Index of the tile.
        tile: The tile.
        warpgroup: Index of the warpgroup.
    """

    shape: PrefillShape
    refs: Refs
    head: Array
    index: Array
    tile: Tile
    warpgroup: Array

    def attend(self) -> None:
        """Runs all steps and writes the result."""
        shape, refs = self.shape, self.refs
        queries, first_row = refs.queries.at[self.warpgroup], self.warpgroup * WGMMA_ROWS
        rows = pl.ds(first_row, WGMMA_ROWS)
        carry = ragged_tile.initial_carry(
            shape, WGMMA, refs.sinks.at[self.head, rows] if shape.has_sinks else None
        )
        plgpu.barrier_wait(refs.queries_loaded)

        def attend_step(step: Array, carry: Carry, *, is_full: bool) -> Carry:
            return self.attend_step(queries, first_row, step, carry, is_full=is_full)

        result = ragged_tile.run_steps(shape, self.tile, attend_step, carry)
        # After this barrier all warps have multiplied their queries, which the result overwrites.
        plgpu.commit_smem()
        queries[...] = result
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(queries, refs.out.at[self.index, self.head, rows])
        plgpu.wait_smem_to_gmem(0)

    def attend_step(
        self, queries: Any, first_row: Array, step: Array, carry: Carry, *, is_full: bool
    ) -> Carry:
        """Returns the carry after a step.

        Args:
            queries: Shared memory [WGMMA_ROWS, D].
            first_row: First row of the warpgroup within the tile.
            step: The step.
            carry: The carry before the step.
            is_full: Whether every row attends to all tokens of the step.
        """
        shape, refs, tile = self.shape, self.refs, self.tile
        slot = shape.stage(step)
        if not is_full:  # before the scores are in registers, because clearing needs registers too
            plgpu.barrier_wait(refs.values_loaded.at[slot])
            self.clear_values(step, refs.values.at[slot])
        plgpu.barrier_wait(refs.keys_loaded.at[slot])
        scores = _multiply(queries, refs.keys.at[slot].transpose((1, 0)), shape.config.block_tokens)
        plgpu.barrier_arrive(refs.keys_free.at[slot])
        live = None if is_full else ragged_tile.live(shape, tile, first_row, step, WGMMA)
        bias = ragged_tile.bias(shape, tile, self.head, first_row, step, WGMMA, refs.bias)
        probs, (acc, largest, total) = ragged_tile.softmax(shape, scores, carry, live, bias)
        if is_full:
            plgpu.barrier_wait(refs.values_loaded.at[slot])
        # The interpreter does not support wgmma with an operand in registers or with an existing accumulator.
        if shape.interpret:
            own_probs = refs.probs.at[self.warpgroup]
            own_probs[...] = probs
            plgpu.commit_smem()
            acc += _multiply(own_probs, refs.values.at[slot], shape.head_dim)
        else:
            add = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, probs, refs.values.at[slot]))
            acc = add(ACC.init(acc))
        plgpu.barrier_arrive(refs.values_free.at[slot])
        return acc, largest, total

    def clear_values(self, step: Array, values_ref: Any) -> None:
        """Clears the values of dead slots in shared memory.

        The first multiplying warpgroup clears them, and the other one waits for it.
        """
        shape, tile, tokens = self.shape, self.tile, self.shape.config.block_tokens
        has_dead_slots = (step + 1) * tokens > tile.context_len
        if shape.window is not None:
            has_dead_slots |= step * tokens <= tile.first - shape.window

        def clear() -> None:
            width = shape.head_dim if shape.head_dim % 64 else 64
            corners = itertools.product(range(0, tokens, WGMMA_ROWS), range(0, shape.head_dim, width))
            for start, column in corners:
                part = values_ref.at[pl.ds(start, WGMMA_ROWS), pl.ds(column, width)]
                values = plgpu.load(part, layout=WGMMA, optimized=False)
                part[...] = ragged_tile.clear_dead(shape, tile, values, step * tokens + start, WGMMA)
            plgpu.commit_smem()

        @pl.when(has_dead_slots)
        def _():
            pl.when(self.warpgroup == 0)(clear)
            if shape.num_computing > 1:
                plgpu.barrier_arrive(self.refs.values_cleared)
                plgpu.barrier_wait(self.refs.values_cleared)


def _multiply(a: Any, b: Any, columns: int) -> Array:
    """Returns a @ b, float32 [WGMMA_ROWS, columns]."""

    def run(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(run, ACC((WGMMA_ROWS, columns), jnp.float32))
