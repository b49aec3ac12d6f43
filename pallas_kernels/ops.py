"""The public ops: shapes checked, backend chosen, then one implementation called.

The pool of a layer is [P, 2, K, S, D]: P pages of S tokens, keys (0) and values (1) apart, one contiguous
[S, D] tile a kv head. A page here is what the host calls a block. A slot is page * S + offset:

    page 0 (null)      page 1             page 2                     slots of page 2, S = 4
    +---------------+  +---------------+  +---------------+
    | K head 0 [S,D]|  | K head 0 [S,D]|  | K head 0 [S,D]|   ->    8 9 10 11
    | K head 1 [S,D]|  | K head 1 [S,D]|  | K head 1 [S,D]|
    | V head 0 [S,D]|  | V head 0 [S,D]|  | V head 0 [S,D]|
    | V head 1 [S,D]|  | V head 1 [S,D]|  | V head 1 [S,D]|
    +---------------+  +---------------+  +---------------+
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels import xla

Backend = Literal["auto", "xla"]
BACKENDS: tuple[Backend, ...] = ("auto", "xla")


def resolve_backend(backend: str, *, name: str = "backend") -> Literal["xla"]:
    """Returns the backend that `backend` stands for on this machine.

    Args:
        backend: "auto" or "xla". "auto" is "xla" everywhere until Pallas kernels have passed on a GPU.
        name: What the caller's argument is called.

    Raises:
        ValueError: If the backend is unknown or this build lacks it.
    """
    if backend not in BACKENDS:
        raise ValueError(f"{name} is {backend!r}; allowed in this build: {' or '.join(map(repr, BACKENDS))}")
    return "xla"


def write_kv(
    kv_pages: Float[Array, "p 2 k s d"],
    k: Float[Array, "t k d"],
    v: Float[Array, "t k d"],
    slot_mapping: Int[Array, " t"],
    *,
    backend: Backend = "auto",
) -> Float[Array, "p 2 k s d"]:
    """Writes a key and a value a token into their slots; in place where the pool is donated.

    Args:
        kv_pages: The pool.
        k: Keys, converted to the pool's dtype.
        v: Values, converted to the pool's dtype.
        slot_mapping: int32 [T]; a slot of P * S or more is not written.
        backend: Which implementation.

    Returns:
        The pool with the tokens written.
    """
    _check_pool(kv_pages)
    _check("k", k.shape, (slot_mapping.shape[0], kv_pages.shape[2], kv_pages.shape[4]))
    _check("v", v.shape, k.shape)
    resolve_backend(backend)
    return xla.write_kv(kv_pages, k, v, slot_mapping)


def copy_blocks(
    kv_pages: Float[Array, "p 2 k s d"],
    src: Int[Array, " n"],
    dst: Int[Array, " n"],
    *,
    backend: Backend = "auto",
) -> Float[Array, "p 2 k s d"]:
    """Copies whole pages; all are read before any is written.

    Args:
        kv_pages: The pool.
        src: int32 [N], pages to read.
        dst: int32 [N], pages to write, all different; a pair with a page of P or more is skipped.
        backend: Which implementation.

    Returns:
        The pool with the pages copied.
    """
    _check_pool(kv_pages)
    _check("dst", dst.shape, src.shape)
    resolve_backend(backend)
    return xla.copy_blocks(kv_pages, src, dst)


def paged_decode(
    q: Float[Array, "b h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    backend: Backend = "auto",
) -> Float[Array, "b h d"]:
    """Attends with one query a sequence, the last token of its context, over the pages of its table.

    Args:
        q: Queries.
        kv_pages: The pool; what dead slots hold, NaN included, never matters.
        block_tables: int32 [B, M], pages in order of position.
        context_lens: int32 [B], tokens attended to; 0 gives an output of exactly 0.
        scale: Factor of the scores.
        window: Only the last `window` tokens are attended to; None for all.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap); None for none.
        backend: Which implementation.

    Returns:
        Attention in the dtype of q.

    Source: Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, SOSP 2023.
    """
    _check_attention(q, kv_pages, block_tables, context_lens)
    _check("block_tables", block_tables.shape[:1], q.shape[:1])
    resolve_backend(backend)
    return xla.paged_decode(
        q, kv_pages, block_tables, context_lens, scale=scale, window=window, soft_cap=soft_cap
    )


def ragged_attention(
    q: Float[Array, "t h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    query_start_loc: Int[Array, " b1"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    backend: Backend = "auto",
) -> Float[Array, "t h d"]:
    """Attends with any number of queries a sequence, the last positions of its context, causally.

    Args:
        q: Queries of all sequences, one sequence after the other.
        kv_pages: The pool; what dead slots hold, NaN included, never matters.
        block_tables: int32 [B, M], pages in order of position.
        context_lens: int32 [B], tokens of each sequence, its queries included.
        query_start_loc: int32 [B + 1]; sequence b has the rows [query_start_loc[b], query_start_loc[b+1]).
        scale: Factor of the scores.
        window: A query attends to itself and the window - 1 tokens before it; None for all.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap); None for none.
        backend: Which implementation.

    Returns:
        Attention in the dtype of q; exactly 0 in rows from query_start_loc[B] on.
    """
    _check_attention(q, kv_pages, block_tables, context_lens)
    _check("query_start_loc", query_start_loc.shape, (block_tables.shape[0] + 1,))
    resolve_backend(backend)
    return xla.ragged_attention(
        q,
        kv_pages,
        block_tables,
        context_lens,
        query_start_loc,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )


def _check(name: str, shape: tuple[int, ...], allowed: tuple[int, ...]) -> None:
    if tuple(shape) != tuple(allowed):
        raise ValueError(
            f"{name} has shape {tuple(shape)}; allowed with the other arguments: {tuple(allowed)}"
        )


def _check_pool(kv_pages: Array) -> None:
    if kv_pages.ndim != 5 or kv_pages.shape[1] != 2:
        raise ValueError(
            f"kv_pages has shape {kv_pages.shape}; allowed: [pages, 2, kv_heads, page_size, head_dim]"
        )


def _check_attention(q: Array, kv_pages: Array, block_tables: Array, context_lens: Array) -> None:
    _check_pool(kv_pages)
    kv_heads, head_dim = kv_pages.shape[2], kv_pages.shape[4]
    if q.ndim != 3 or q.shape[2] != head_dim or q.shape[1] % kv_heads:
        raise ValueError(
            f"q has shape {q.shape}; allowed with kv_pages {kv_pages.shape}: "
            f"[rows, a multiple of {kv_heads} heads, {head_dim}]"
        )
    if q.dtype != kv_pages.dtype:
        raise ValueError(f"q has dtype {q.dtype}; allowed: the dtype of kv_pages, {kv_pages.dtype}")
    if block_tables.ndim != 2:
        raise ValueError(f"block_tables has shape {block_tables.shape}; allowed: [sequences, pages]")
    _check("context_lens", context_lens.shape, block_tables.shape[:1])
    for name, array in (("block_tables", block_tables), ("context_lens", context_lens)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {array.dtype}; allowed: int32")
