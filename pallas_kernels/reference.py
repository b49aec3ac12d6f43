"""The backend "reference": every operation in plain jnp code, which defines the results of all backends.

It is slow and needs much memory, but it can be differentiated, unlike the fast attention backends. ops.py and
grouped_matmul.py describe the parameters.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels.quantization import dequantize, is_quantized, rows_of


def write_kv(kv_pages: Array, k: Array, v: Array | None, slot_mapping: Array) -> Array:
    """Writes k[t] and v[t] to slot slot_mapping[t]."""
    num_pages, parts, kv_heads, page_size, row_size = kv_pages.shape
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    head_dim = row_size - is_quantized(kv_pages)
    # Indices of a row's elements in its flattened tile. In a quantized tile, the scales follow all numbers.
    numbers = offset[:, None] * head_dim + jnp.arange(head_dim)
    indices = jnp.concatenate([numbers, page_size * head_dim + offset[:, None]], axis=1)[:, :row_size]
    tiles = kv_pages.reshape(num_pages, parts, kv_heads, page_size * row_size)
    for which, rows in enumerate((k,) if v is None else (k, v)):
        rows = rows.astype(kv_pages.dtype).swapaxes(1, 2)
        tiles = tiles.at[page[:, None], which, :, indices].set(rows, mode="drop")
    return tiles.reshape(kv_pages.shape)


def copy_blocks(kv_pages: Array, src: Array, dst: Array) -> Array:
    """Copies page src[n] to page dst[n]."""
    dst = jnp.where(src < len(kv_pages), dst, len(kv_pages))
    return kv_pages.at[dst].set(kv_pages.at[src].get(mode="clip"), mode="drop")


def grouped_matmul(x: Array, kernels: Array, group_sizes: Array) -> Array:
    """Multiplies all rows by the kernel of each group in turn and keeps the rows that belong to the group."""
    group = jnp.sum(jnp.arange(len(x))[:, None] >= jnp.cumsum(group_sizes), axis=1)

    def set_rows(out: Array, numbered_kernel: tuple[Array, Array]) -> tuple[Array, None]:
        number, kernel = numbered_kernel
        product = jnp.dot(x, kernel, preferred_element_type=jnp.float32)
        return jnp.where((group == number)[:, None], product, out), None

    out = jnp.zeros((len(x), kernels.shape[2]), jnp.float32)
    return jax.lax.scan(set_rows, out, (jnp.arange(len(kernels)), kernels))[0].astype(x.dtype)


def paged_decode(
    q: Array, kv_pages: Array, block_tables: Array, context_lens: Array, **options: Any
) -> Array:
    """Computes the attention of query b, the last token of sequence b."""
    start = jnp.arange(len(q) + 1)
    return ragged_attention(q, kv_pages, block_tables, context_lens, start, **options)


def ragged_attention(
    q: Float[Array, "t h d"],
    kv_pages: Float[Array, "p n k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    query_start_loc: Int[Array, " b1"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    distance_bias: Float[Array, "h n"] | None = None,
    shared_blocks: Int[Array, " b"] | None = None,
    value_dim: int | None = None,
) -> Float[Array, "t h v"]:
    """Computes the causal attention of each query over the context of its sequence.

    shared_blocks is ignored: it only affects how often pages are read, and here every sequence reads its own.
    """
    row = jnp.arange(q.shape[0])
    seq = jnp.sum(row[:, None] >= query_start_loc[1:], axis=1)
    is_padding = seq >= len(block_tables)
    seq = jnp.minimum(seq, len(block_tables) - 1)
    position = (context_lens[seq] - query_start_loc[seq + 1] + row)[:, None]
    token = jnp.arange(block_tables.shape[1] * kv_pages.shape[3])
    live = (token <= position) & (token < context_lens[seq][:, None]) & ~is_padding[:, None]
    if window is not None:
        live &= token > position - window

    tokens = dequantize(rows_of(kv_pages[block_tables]), jnp.dtype("float32"))
    tokens = tokens.transpose(0, 1, 4, 2, 3, 5)  # [B, M, S, parts, K, D]
    tokens = tokens.reshape(len(block_tables), len(token), *tokens.shape[3:])[seq]
    tokens = jnp.where(live[:, :, None, None, None], tokens, 0)  # dead slots may hold NaN
    parts = jnp.repeat(tokens, q.shape[1] // kv_pages.shape[2], axis=3).transpose(2, 0, 1, 3, 4)
    keys, values = parts[0], parts[-1][..., :value_dim]
    scores = jnp.einsum("thd,tnhd->thn", q.astype(jnp.float32), keys) * scale
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    if distance_bias is not None:
        distance = jnp.clip(position - token, 0, distance_bias.shape[1] - 1)
        scores += distance_bias[:, distance].swapaxes(0, 1)
    # A softmax over nothing but -inf would have NaN gradients, so the scores of rows without a live token
    # stay finite. Their probabilities are set to 0 below.
    is_empty = ~jnp.any(live, axis=1, keepdims=True)
    scores = jnp.where((live | is_empty)[:, None], scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[:, None], (*scores.shape[:2], 1)).astype(jnp.float32)
        scores = jnp.concatenate([scores, sink], axis=2)
    probs = jax.nn.softmax(scores, axis=2)[:, :, : len(token)]
    out = jnp.einsum("thn,tnhd->thd", jnp.where(live[:, None], probs, 0), values)
    return out.astype(q.dtype)
