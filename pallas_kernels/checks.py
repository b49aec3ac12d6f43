"""Argument checks of the ops: shapes, dtypes and options, and, if array values are known, indices.

Inside a trace array values are unknown, and the checks of indices do nothing. The engine checks them on the
host instead, with ops.check_inputs.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jax_paged.pallas_kernels.quantization import is_quantized, row_size

_DTYPES = ("float32", "bfloat16", "float16", "int8", "uint8")


def check_shape(name: str, shape: tuple[int, ...], allowed: tuple[int, ...]) -> None:
    """Raises ValueError if `shape` is not `allowed`, the shape implied by the other arguments."""
    if tuple(shape) != tuple(allowed):
        raise ValueError(
            f"the shape of `{name}` must be {tuple(allowed)} to match the other arguments, got {tuple(shape)}"
        )


def check_int32(**arrays: Array) -> None:
    """Raises ValueError unless all arrays have the dtype int32."""
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"the dtype of `{name}` must be int32, got {array.dtype}")


def check_pool(kv_pages: Array) -> None:
    """Raises ValueError unless the shape and dtype of `kv_pages` are valid for the pool of a layer."""
    if kv_pages.ndim != 5 or kv_pages.shape[1] not in (1, 2) or 0 in kv_pages.shape:
        raise ValueError(
            "the shape of `kv_pages` must be [pages, 2, kv_heads, page_size, head_dim], or [pages, 1, "
            f"kv_heads, page_size, head_dim] for latents, without dimensions of size 0, got {kv_pages.shape}"
        )
    if str(kv_pages.dtype) not in _DTYPES:
        raise ValueError(f"the dtype of `kv_pages` must be one of {', '.join(_DTYPES)}, got {kv_pages.dtype}")


def head_dim_of(kv_pages: Array) -> int:
    """Returns the number of elements of a key in a pool, without the scale of a quantized pool."""
    return kv_pages.shape[4] - row_size(0, kv_pages.dtype)


def check_values(kv_pages: Array, k: Array, v: Array | None) -> None:
    """Raises ValueError unless `v` has the shape of `k`, or is None for a latent pool."""
    if (v is None) != (kv_pages.shape[1] == 1):
        given = None if v is None else f"an array {v.shape}"
        raise ValueError(
            f"`v` must be {'None' if v is not None else 'an array'} with `kv_pages` of shape "
            f"{kv_pages.shape}, got {given}"
        )
    if v is not None:
        check_shape("v", v.shape, k.shape)


def check_value_dim(kv_pages: Array, value_dim: int | None) -> None:
    """Raises ValueError unless `value_dim` is valid: in [1, head_dim] for a latent pool, otherwise None."""
    head_dim, is_latent = head_dim_of(kv_pages), kv_pages.shape[1] == 1
    if (value_dim is not None) != is_latent or (value_dim is not None and not 1 <= value_dim <= head_dim):
        allowed = f"an integer in [1, {head_dim}]" if is_latent else "None"
        raise ValueError(f"`value_dim` must be {allowed} with `kv_pages` {kv_pages.shape}, got {value_dim}")


def check_not_latent(backend: str, kv_pages: Array) -> None:
    """Raises ValueError for a latent pool, for backends that do not support it."""
    if kv_pages.shape[1] == 1:
        raise ValueError(
            f"the shape of `kv_pages` must be [pages, 2, ...] with backend {backend!r}, got {kv_pages.shape} "
            "of a pool of latents; backends 'xla' and 'native' support latents"
        )


def check_attention(q: Array, kv_pages: Array, block_tables: Array, context_lens: Array) -> None:
    """Raises ValueError unless the shapes and dtypes of the attention arguments are valid and consistent."""
    check_pool(kv_pages)
    kv_heads, head_dim = kv_pages.shape[2], head_dim_of(kv_pages)
    if q.ndim != 3 or q.shape[2] != head_dim or q.shape[1] % kv_heads or not q.shape[1]:
        raise ValueError(
            f"the shape of `q` must be [rows, a multiple of {kv_heads} heads, {head_dim}] with `kv_pages` of "
            f"shape {kv_pages.shape}, got {q.shape}"
        )
    allowed = ("float32", "bfloat16", "float16") if is_quantized(kv_pages) else (str(kv_pages.dtype),)
    if str(q.dtype) not in allowed:
        choice = f"one of {', '.join(allowed)}" if len(allowed) > 1 else allowed[0]
        raise ValueError(
            f"the dtype of `q` must be {choice} with `kv_pages` of {kv_pages.dtype}, got {q.dtype}"
        )
    if block_tables.ndim != 2 or 0 in block_tables.shape:
        shape = block_tables.shape
        raise ValueError(
            f"the shape of `block_tables` must be [sequences, pages], both at least 1, got {shape}"
        )
    check_shape("context_lens", context_lens.shape, block_tables.shape[:1])
    check_int32(block_tables=block_tables, context_lens=context_lens)


def check_options(
    q: Array,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Array | None,
    distance_bias: Array | None,
) -> None:
    """Raises ValueError if an option is out of its range, or if two options cannot be combined."""
    if not isinstance(scale, Tracer) and not math.isfinite(scale):
        raise ValueError(f"`scale` must be a finite number, got {scale}")
    if window is not None and (not isinstance(window, int | np.integer) or window < 1):
        raise ValueError(f"`window` must be None or an integer of at least 1, got {window}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"`soft_cap` must be None or a finite number above 0, got {soft_cap}")
    if sinks is not None:
        check_shape("sinks", sinks.shape, q.shape[1:2])
    if distance_bias is not None:
        if distance_bias.ndim != 2 or distance_bias.shape[0] != q.shape[1] or distance_bias.shape[1] < 1:
            raise ValueError(
                f"the shape of `distance_bias` must be [{q.shape[1]}, at least 1] to match `q`, got "
                f"{distance_bias.shape}"
            )
        if soft_cap is not None:
            raise ValueError(f"`soft_cap` must be None with `distance_bias`, got {soft_cap}")


def check_shared(shared_blocks: Array | None, context_lens: Array, window: int | None) -> None:
    """Raises ValueError if `shared_blocks` is not int32 [B], or is combined with a window."""
    if shared_blocks is not None:
        check_shape("shared_blocks", shared_blocks.shape, context_lens.shape)
        check_int32(shared_blocks=shared_blocks)
        if window is not None:
            raise ValueError(f"`window` must be None with `shared_blocks`, got {window}")


def check_none(backend: str, **arrays: Array | None) -> None:
    """Raises ValueError if an array is passed that the backend does not support.

    Args:
        backend: Name of the backend, for the error message.
        **arrays: Values of the unsupported arguments, by name.
    """
    for name, array in arrays.items():
        if array is not None:
            raise ValueError(
                f"`{name}` must be None with backend {backend!r}, got shape {array.shape}; backends 'xla' "
                "and 'native' support it"
            )


def check_queries(q: Array, context_lens: Array, query_start_loc: Array) -> None:
    """Raises ValueError unless query_start_loc divides the rows of `q` validly among the sequences.

    Nothing is checked inside a trace. A sequence may not have more queries than tokens.
    """
    known = _known(context_lens, query_start_loc)
    if known is None:
        return
    lens, starts = known
    _check_range("query_start_loc", starts, 0, len(q))
    num_queries = np.diff(starts)
    if (num_queries < 0).any():
        b = int((num_queries < 0).argmax())
        raise ValueError(f"`query_start_loc[{b + 1}]` must be at least {starts[b]}, got {starts[b + 1]}")
    if (num_queries > lens).any():
        b = int((num_queries > lens).argmax())
        raise ValueError(
            f"`context_lens[{b}]` must be at least the {num_queries[b]} queries of the sequence, "
            f"got {lens[b]}"
        )


def check_pages(
    kv_pages: Array,
    block_tables: Array,
    context_lens: Array,
    query_start_loc: Array | None = None,
    *,
    window: int | None,
) -> None:
    """Raises ValueError if a sequence would read outside of its block table or of the pool.

    Nothing is checked inside a trace.

    Args:
        kv_pages: The pool.
        block_tables: int32 [B, M]. Entries that are not read may have any value.
        context_lens: int32 [B].
        query_start_loc: int32 [B + 1]; None for one query per sequence.
        window: Sliding window (tokens); None for none.
    """
    known = _known(block_tables, context_lens, *(() if query_start_loc is None else (query_start_loc,)))
    if known is None:
        return
    tables, lens, *starts = known
    num_pages, page_size, columns = kv_pages.shape[0], kv_pages.shape[3], np.arange(tables.shape[1])
    _check_range("context_lens", lens, 0, len(columns) * page_size)
    num_queries = np.diff(starts[0]) if starts else np.minimum(lens, 1)
    first = np.zeros_like(lens) if window is None else np.maximum(lens - num_queries - window + 1, 0)
    is_read = (columns * page_size < lens[:, None]) & (columns >= first[:, None] // page_size)
    is_read &= num_queries[:, None] > 0
    _check_range("block_tables", np.where(is_read, tables, 0), 0, num_pages - 1)


def check_slots(kv_pages: Array, slot_mapping: Array) -> None:
    """Raises ValueError if slots are negative or written twice. Nothing is checked inside a trace."""
    if (known := _known(slot_mapping)) is not None:
        (slots,) = known
        _check_range("slot_mapping", slots, 0, None)
        _check_unique("slot_mapping", slots[slots < kv_pages.shape[0] * kv_pages.shape[3]])


def check_copies(kv_pages: Array, src: Array, dst: Array, *, may_overlap: bool) -> None:
    """Raises ValueError if pages are negative or written twice. Nothing is checked inside a trace.

    Args:
        kv_pages: The pool.
        src: int32 [N].
        dst: int32 [N].
        may_overlap: Whether a page may be both read and written.
    """
    if (known := _known(src, dst)) is None:
        return
    _check_range("src", known[0], 0, None)
    _check_range("dst", known[1], 0, None)
    is_copied = (known[0] < kv_pages.shape[0]) & (known[1] < kv_pages.shape[0])
    read, written = (pages[is_copied] for pages in known)
    _check_unique("dst", written)
    both = np.intersect1d(read, written)
    if len(both) and not may_overlap:
        raise ValueError(
            f"`dst` must contain no page of `src` with the Pallas backends, got page {both[0]} in both; "
            "backends 'xla' and 'native' support it"
        )


def _known(*arrays: Any) -> list[np.ndarray] | None:
    """Returns the values of arrays as int64; None if one of them is a tracer."""
    if any(isinstance(array, Tracer) for array in arrays):
        return None
    return [np.asarray(array).astype(np.int64) for array in arrays]


def _check_range(name: str, values: np.ndarray, low: int, high: int | None) -> None:
    is_wrong = (values < low) | (values > (values if high is None else high))
    if is_wrong.any():
        where = np.argwhere(is_wrong)[0]
        allowed = f"at least {low}" if high is None else f"an integer in [{low}, {high}]"
        index = ", ".join(map(str, where))
        raise ValueError(f"`{name}[{index}]` must be {allowed}, got {values[tuple(where)]}")


def _check_unique(name: str, values: np.ndarray) -> None:
    found, counts = np.unique(values, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"the values of `{name}` must be unique, got {found[counts.argmax()]} twice")
