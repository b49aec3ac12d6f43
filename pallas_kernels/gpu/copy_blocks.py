"""The copy_blocks kernel: copies pages within the pool, in place, with one launch for all pairs.

The grid is (kv head, keys or values, pair of pages). Each thread block copies one tile [S, D] from global
memory through registers to global memory, without shared memory. A pair with a page that is out of range is
skipped.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels.gpu import quantized_tile, tuning
from jax_paged.pallas_kernels.quantization import is_quantized


@functools.partial(jax.jit, static_argnames="interpret")
def copy_blocks(
    kv_pages: Float[Array, "p 2 k s d"], src: Int[Array, " n"], dst: Int[Array, " n"], *, interpret: bool
) -> Float[Array, "p 2 k s d"]:
    """See ops.copy_blocks. The function is jitted so that equal layers are lowered once.

    No page may be in both src and dst, because the copies run in any order.

    Args:
        kv_pages: The pool.
        src: int32 [N], pages to read.
        dst: int32 [N], pages to write.
        interpret: Whether to run in the interpreter.

    Raises:
        ValueError: If the S * D elements of a tile cannot be divided evenly among 128 threads, or if head_dim
            of a quantized pool is not a multiple of 16.
    """
    num_pages, _, kv_heads, page_size, row_size = kv_pages.shape
    is_quantized_pool = is_quantized(kv_pages)
    head_dim = row_size - is_quantized_pool
    if page_size * head_dim % 128 or head_dim % (16 if is_quantized_pool else 1):
        raise ValueError(
            "page_size times head_dim of `kv_pages` must be a multiple of 128 with backend 'pallas', and "
            f"head_dim a multiple of 16 if the pool is quantized, got page_size {page_size} and "
            f"head_dim {head_dim}. Backend 'xla' has no such limit"
        )
    pool_ref = jax.new_ref(quantized_tile.flat(kv_pages) if is_quantized_pool else kv_pages)

    def body(src_ref, dst_ref):
        pair, which, head = (lax.axis_index(name) for name in ("pair", "which", "head"))
        source, target = src_ref[pair], dst_ref[pair]

        @pl.when((source < num_pages) & (target < num_pages))
        def _():
            if not is_quantized_pool:
                pool_ref[target, which, head] = pool_ref[source, which, head]
                return
            numbers, scales = pl.ds(0, page_size * head_dim), pl.ds(page_size * head_dim, page_size)
            pool_ref[target, which, head, numbers] = pool_ref[source, which, head, numbers]
            layout = quantized_tile.layout(head_dim).reduce(1)
            found = plgpu.load(pool_ref.at[source, which, head, scales], layout=layout, optimized=False)
            tuning.store(pool_ref.at[target, which, head, scales], found)

    plgpu.kernel(
        body,
        grid=(kv_heads, 2, src.shape[0]),
        grid_names=("head", "which", "pair"),
        kernel_name="copy_blocks",
        interpret=tuning.interpret_params(interpret),
    )(src, dst)
    return jax.freeze(pool_ref).reshape(kv_pages.shape)
