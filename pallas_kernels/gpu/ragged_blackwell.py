"""The ragged attention kernel for Blackwell, which has TMA and mma.sync, but no wgmma.

ragged_prefill.py describes the tiles and the grid. As on sm_80, one warpgroup multiplies a tile of 64 query
rows (32 rows if head_dim is larger than 128) by mma.sync. As on sm_90, TMA copies pages into a ring of
stages.

Memory:

- Global memory: tiles of queries, pool, block tables, list of tiles, and tiles of output.
- Shared memory: `num_stages` stages with the keys and values of one step each, and the probabilities of the
  current step.
- Registers: scores, float32 accumulator, running maximum and sum. The queries are loaded from global memory
  in every step, because there are not enough registers to keep them.

The loop:

1. Before the first step, start copying the first num_stages - 1 steps.
2. For each step, wait for the keys, multiply queries and keys, mask the scores if necessary, and update the
   online softmax.
3. Write the probabilities to shared memory. After a barrier, at which all warps have also read the previous
   step, start copying the step that is num_stages - 1 ahead, to the stage of the previous step.
4. Wait for the values, multiply the probabilities by them, and accumulate.
5. After the last step, divide by the denominator and write the tile of output.

Blackwell GPUs in data centers also have tcgen05, which is several times as fast as mma.sync. This kernel does
not use it, so that it runs on the other GPUs of that generation too.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jax_paged.pallas_kernels.gpu import ragged_tile, tuning
from jax_paged.pallas_kernels.gpu.ragged_tile import Carry, PrefillShape


def mma_kernel(shape: PrefillShape) -> Callable[..., Array]:
    """Returns the kernel. It takes tiles of queries and the pool, and returns tiles of attention output."""
    config, page_size, tokens = shape.config, shape.page_size, shape.config.block_tokens
    num_stages, pages = config.num_stages, tokens // page_size
    lhs, rhs, acc_layout = (
        layout(shape.dtype, m_warps=shape.rows // 16)
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    mma = functools.partial(tuning.mma, interpret=shape.interpret)

    def body(tiles_ref, q_ref, kv_ref, tables_ref, sinks_ref, bias_ref, out_ref, k_s, v_s, p_s, k_bar, v_bar):
        head, index, tile = ragged_tile.current_tile(shape, tiles_ref)
        begin, *_middle, end = ragged_tile.step_ranges(shape, tile)

        def copy(step: Array) -> None:
            slot = shape.stage(step)
            page_ids = ragged_tile.pages_of(shape, tile, tables_ref, step)
            for which, (ref, bar) in enumerate(((k_s, k_bar), (v_s, v_bar))):
                for i, page in enumerate(page_ids):
                    target = ref.at[slot, pl.ds(i * page_size, page_size)]
                    plgpu.copy_gmem_to_smem(kv_ref.at[page, which, head], target, bar.at[slot])

        def attend(step: Array, carry: Carry, *, is_full: bool) -> Carry:
            slot, ahead = shape.stage(step), step + (num_stages - 1)
            # The queries are loaded in every step because there are not enough registers to keep them.
            queries = plgpu.load(q_ref.at[index, head], layout=lhs, optimized=False)
            scores = plgpu.layout_cast(jnp.zeros((shape.rows, tokens), jnp.float32), acc_layout)
            plgpu.barrier_wait(k_bar.at[slot])
            keys = plgpu.load(k_s.at[slot].T, layout=rhs, optimized=False)
            live = None if is_full else ragged_tile.live(shape, tile, 0, step, acc_layout)
            bias = ragged_tile.bias(shape, tile, head, 0, step, acc_layout, bias_ref)
            probs, (acc, largest, total) = ragged_tile.softmax(
                shape, mma(scores, queries, keys), carry, live, bias
            )
            p_s[...] = probs
            plgpu.commit_smem()
            pl.when(ahead < end)(functools.partial(copy, ahead))
            plgpu.barrier_wait(v_bar.at[slot])
            probs = plgpu.load(p_s, layout=lhs, optimized=False)
            values = plgpu.load(v_s.at[slot], layout=rhs, optimized=False)
            if not is_full:
                values = ragged_tile.clear_dead(shape, tile, values, step * tokens, rhs)
            return mma(acc, probs, values), largest, total

        @pl.when(end > begin)
        def _():
            for stage in range(num_stages - 1):
                pl.when(begin + stage < end)(functools.partial(copy, begin + stage))
            sinks = sinks_ref.at[head] if shape.has_sinks else None
            carry = ragged_tile.initial_carry(shape, acc_layout, sinks)
            tuning.store(out_ref.at[index, head], ragged_tile.run_steps(shape, tile, attend, carry))

    transforms = tuning.smem_transforms(shape.head_dim, shape.dtype)
    stages = plgpu.SMEM((num_stages, tokens, shape.head_dim), shape.dtype, transforms=transforms)
    probs = plgpu.SMEM(
        (shape.rows, tokens), shape.dtype, transforms=tuning.smem_transforms(tokens, shape.dtype)
    )
    loaded = plgpu.Barrier(num_arrivals=pages, num_barriers=num_stages)
    return ragged_tile.make_kernel(shape, body, [stages, stages, probs, loaded, loaded])
