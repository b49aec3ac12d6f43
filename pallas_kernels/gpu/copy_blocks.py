"""The copy_blocks kernel: all copies of a step in one launch, in place; one block of threads per tile."""

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
    """See ops.copy_blocks. No page may be in both src and dst: the copies run in any order.

    Jitted, so that equal layers are lowered once.

    Raises:
        ValueError: If 128 threads cannot share the S * D elements of a tile.
    """
    num_pages, _, kv_heads, page_size, row_size = kv_pages.shape
    is_bytes = is_quantized(kv_pages)
    head_dim = row_size - is_bytes
    if page_size * head_dim % 128 or head_dim % (16 if is_bytes else 1):
        raise ValueError(
            "page_size times head_dim of `kv_pages` must be a multiple of 128 with backend 'pallas', and "
            f"head_dim one of 16 in a pool of bytes, got {page_size} and {head_dim}. Backend 'xla' takes any"
        )
    pool_ref = jax.new_ref(quantized_tile.flat(kv_pages) if is_bytes else kv_pages)

    def body(src_ref, dst_ref):
        pair, which, head = (lax.axis_index(name) for name in ("pair", "which", "head"))
        source, target = src_ref[pair], dst_ref[pair]

        @pl.when((source < num_pages) & (target < num_pages))
        def _():
            if not is_bytes:
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
