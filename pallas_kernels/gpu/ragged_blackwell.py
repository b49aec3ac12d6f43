"""The ragged attention kernel for Blackwell, which has TMA and mma.sync, and no wgmma.

A tile is what ragged_prefill.py has on sm_80: 64 query rows, or 32 of wide heads, that one warpgroup
multiplies by mma.sync. Pages come by TMA, as on sm_90, into a ring of stages. The warps meet once per step,
when the probabilities are in shared memory: all of them have then read the step before, whose stage is filled
again.

Blackwell in data centres has tcgen05 beside, with several times the speed of mma.sync. This kernel serves the
other GPUs of that generation too.
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
    """Returns the kernel: tiles of queries, and the pages that they see, to tiles of attention."""
    config, page_size, tokens = shape.config, shape.page_size, shape.config.block_tokens
    num_stages, pages = config.num_stages, tokens // page_size
    lhs, rhs, out = (
        layout(shape.dtype, m_warps=shape.rows // 16)
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    mma = functools.partial(tuning.mma, interpret=shape.interpret)

    def body(tiles_ref, q_ref, kv_ref, tables_ref, sinks_ref, bias_ref, out_ref, k_s, v_s, p_s, k_bar, v_bar):
        head, index, tile = ragged_tile.of_block(shape, tiles_ref)
        begin, *_middle, end = ragged_tile.spans(shape, tile)

        def copy(step: Array) -> None:
            slot = shape.stage(step)
            page_ids = ragged_tile.pages_of(shape, tile, tables_ref, step)
            for which, (ref, bar) in enumerate(((k_s, k_bar), (v_s, v_bar))):
                for i, page in enumerate(page_ids):
                    target = ref.at[slot, pl.ds(i * page_size, page_size)]
                    plgpu.copy_gmem_to_smem(kv_ref.at[page, which, head], target, bar.at[slot])

        def attend(step: Array, carry: Carry, *, is_full: bool) -> Carry:
            slot, ahead = shape.stage(step), step + (num_stages - 1)
            # Loaded again at every step, as no registers are left to keep them.
            queries = plgpu.load(q_ref.at[index, head], layout=lhs, optimized=False)
            scores = plgpu.layout_cast(jnp.zeros((shape.rows, tokens), jnp.float32), out)
            plgpu.barrier_wait(k_bar.at[slot])
            keys = plgpu.load(k_s.at[slot].T, layout=rhs, optimized=False)
            live = None if is_full else ragged_tile.live(shape, tile, 0, step, out)
            bias = ragged_tile.bias(shape, tile, head, 0, step, out, bias_ref)
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
            carry = ragged_tile.start(shape, out, sinks_ref.at[head] if shape.has_sinks else None)
            tuning.store(out_ref.at[index, head], ragged_tile.walk(shape, tile, attend, carry))

    transforms = tuning.smem_transforms(shape.head_dim, shape.dtype)
    stages = plgpu.SMEM((num_stages, tokens, shape.head_dim), shape.dtype, transforms=transforms)
    probs = plgpu.SMEM(
        (shape.rows, tokens), shape.dtype, transforms=tuning.smem_transforms(tokens, shape.dtype)
    )
    loaded = plgpu.Barrier(num_arrivals=pages, num_barriers=num_stages)
    return ragged_tile.make(shape, body, [stages, stages, probs, loaded, loaded])
