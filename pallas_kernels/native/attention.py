"""The backend "native": calls of the operations in attention.cc."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels import native

# A window that is longer than any context.
NO_WINDOW = 2**31 - 1
# The `max_width` that allows the widest instructions of any processor, AMX tiles, which multiply bfloat16
# only.
MAX_WIDTH = 256


def write_kv(
    kv_pages: Float[Array, "p n k s d"],
    k: Float[Array, "t k d"],
    v: Float[Array, "t k d"] | None,
    slot_mapping: Int[Array, " t"],
) -> Float[Array, "p n k s d"]:
    """See ops.write_kv."""
    k = k.astype(kv_pages.dtype)
    v = k if v is None else v.astype(kv_pages.dtype)  # for a latent pool the values are not read
    args = kv_pages, k, v, slot_mapping
    return _call("jax_paged_write_kv", kv_pages.shape, *args, input_output_aliases={0: 0})


def copy_blocks(
    kv_pages: Float[Array, "p n k s d"], src: Int[Array, " c"], dst: Int[Array, " c"]
) -> Float[Array, "p n k s d"]:
    """See ops.copy_blocks."""
    args = kv_pages, src, dst
    return _call("jax_paged_copy_blocks", kv_pages.shape, *args, input_output_aliases={0: 0})


def paged_decode(
    q: Float[Array, "b h d"],
    kv_pages: Float[Array, "p n k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    **options: Any,
) -> Float[Array, "b h v"]:
    """See ops.paged_decode; `options` are passed to ragged_attention."""
    no_starts = jnp.zeros(0, jnp.int32)
    return ragged_attention(q, kv_pages, block_tables, context_lens, no_starts, **options)


def ragged_attention(
    q: Float[Array, "t h d"],
    kv_pages: Float[Array, "p n k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    query_start_loc: Int[Array | np.ndarray, " b1"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    distance_bias: Float[Array, "h n"] | None = None,
    shared_blocks: Int[Array, " b"] | None = None,
    value_dim: int | None = None,
    max_width: int = MAX_WIDTH,
) -> Float[Array, "t h v"]:
    """See ops.ragged_attention.

    Args:
        q: Queries of all sequences.
        kv_pages: The pool.
        block_tables: int32 [B, M], pages of the sequences.
        context_lens: int32 [B].
        query_start_loc: int32 [B + 1], first row of each sequence; empty if every sequence has one query.
        scale: Factor of the scores.
        window: Sliding window (tokens); None for none.
        soft_cap: Soft cap of the scores; None for none.
        sinks: Sink logit of each head; None for none.
        distance_bias: Biases by head and distance; None for none.
        shared_blocks: int32 [B], number of leading pages that each sequence shares with others; None for
            none.
        value_dim: Size of the values in a latent pool; None for other pools.
        max_width: Upper limit for the width of instructions. 4, 8 and 16 are numbers of floats per vector.
            32 also allows bfloat16 products with vectors of 32 numbers, and 256 allows them with AMX tiles.
            On a processor without these instructions, the next narrower ones are used.
    """
    # These are JAX arrays because empty NumPy constants would become arguments of jax.shard_map, and jaxlib
    # 0.11.2 crashes when it removes them.
    sinks = jnp.zeros(0) if sinks is None else sinks.astype(jnp.float32)
    no_bias = jnp.zeros((q.shape[1], 0))
    bias = no_bias if distance_bias is None else distance_bias.astype(jnp.float32)
    shared = jnp.zeros(0, jnp.int32) if shared_blocks is None else shared_blocks
    arrays = (q, kv_pages, block_tables, context_lens, query_start_loc)
    return _call(
        "jax_paged_attend",
        (*q.shape[:2], q.shape[2] if value_dim is None else value_dim),
        *arrays,
        sinks,
        bias,
        shared,
        scale=np.float32(scale),
        window=np.int64(NO_WINDOW if window is None else min(window, NO_WINDOW)),
        soft_cap=np.float32(0 if soft_cap is None else soft_cap),
        max_width=np.int64(max_width),
    )


def _call(
    symbol: str,
    shape: tuple[int, ...],
    *args: Array | np.ndarray,
    input_output_aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> Array:
    """Calls a handler whose result has the given shape and the dtype of its first argument."""
    result = jax.ShapeDtypeStruct(shape, args[0].dtype)
    call = jax.ffi.ffi_call(native.target(symbol), result, input_output_aliases=input_output_aliases)
    return call(*args, **attributes)
