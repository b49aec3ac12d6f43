"""The write_kv kernel: writes the keys and values of new tokens to the pool, in place.

The grid has one thread block per token. A thread block loads the token's K * D keys from global memory into
registers and stores them as K rows of D elements, one row in the tile of each kv head, then does the same for
the values. It does not use shared memory. For a quantized pool it also copies one scale per row. Tokens whose
slot is out of range are skipped.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels.gpu import quantized_tile, tuning
from jax_paged.pallas_kernels.quantization import is_quantized


@functools.partial(jax.jit, static_argnames="interpret")
def write_kv(
    kv_pages: Float[Array, "p 2 k s d"],
    k: Float[Array, "t k d"],
    v: Float[Array, "t k d"],
    slot_mapping: Int[Array, " t"],
    *,
    interpret: bool,
) -> Float[Array, "p 2 k s d"]:
    """See ops.write_kv. The function is jitted so that equal layers are lowered once.

    Args:
        kv_pages: The pool.
        k: Keys in the dtype of the pool; for a quantized pool, rows that end with their scale.
        v: Values, as k.
        slot_mapping: int32 [T], the slot of each token.
        interpret: Whether to run in the interpreter.

    Raises:
        ValueError: If head_dim is not a multiple of 16.
    """
    num_pages, _, kv_heads, page_size, row_size = kv_pages.shape
    is_quantized_pool = is_quantized(kv_pages)
    head_dim = row_size - is_quantized_pool
    if head_dim % 16:
        raise ValueError(
            f"head_dim of `kv_pages` must be a multiple of 16 with backend 'pallas', got {head_dim}. "
            "Backend 'xla' has no such limit"
        )
    layout = tuning.row_layout(kv_heads * head_dim)
    pool_ref = jax.new_ref(quantized_tile.flat(kv_pages) if is_quantized_pool else kv_pages)
    rows = [x[..., :head_dim] for x in (k, v)]
    scales = [x[..., head_dim] for x in (k, v)] if is_quantized_pool else []

    def body(k_ref, v_ref, slot_ref, *scale_refs):
        token = lax.axis_index("token")
        slot = slot_ref[token]

        @pl.when(slot < num_pages * page_size)
        def _():
            page, offset = lax.div(slot, jnp.int32(page_size)), lax.rem(slot, jnp.int32(page_size))
            for which, ref in enumerate((k_ref, v_ref)):
                tile = plgpu.load(ref.at[token], layout=layout, optimized=False)
                place = pl.ds(offset * head_dim, head_dim) if is_quantized_pool else offset
                tuning.store(pool_ref.at[page, which, :, place], tile)
            found = [[ref[token, head] for head in range(kv_heads)] for ref in scale_refs]
            for which, of_heads in enumerate(found):
                for head, scale in enumerate(of_heads):
                    pool_ref[page, which, head, page_size * head_dim + offset] = scale

    plgpu.kernel(
        body,
        grid=(slot_mapping.shape[0],),
        grid_names=("token",),
        kernel_name="write_kv",
        interpret=tuning.interpret_params(interpret),
    )(*rows, slot_mapping, *scales)
    return jax.freeze(pool_ref).reshape(kv_pages.shape)
