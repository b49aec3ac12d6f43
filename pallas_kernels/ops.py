"""The public ops: they check shapes, choose a backend and call its implementation.

The pool of a layer is [P, 2, K, S, D]: P pages of S tokens, keys (0) and values (1) apart, one contiguous
[S, D] tile per kv head. A page is what the host calls a block. A token's slot is page * S + offset:

    page 0 (null)      page 1             page 2                     slots of page 2, S = 4
    +---------------+  +---------------+  +---------------+
    | K head 0 [S,D]|  | K head 0 [S,D]|  | K head 0 [S,D]|   ->    8 9 10 11
    | K head 1 [S,D]|  | K head 1 [S,D]|  | K head 1 [S,D]|
    | V head 0 [S,D]|  | V head 0 [S,D]|  | V head 0 [S,D]|
    | V head 1 [S,D]|  | V head 1 [S,D]|  | V head 1 [S,D]|
    +---------------+  +---------------+  +---------------+

A quantised pool, of int8 or uint8 (fp8_e4m3), has tiles [S, D + 1] of bytes: see quantization.py.
"""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels import native, reference, xla
from jax_paged.pallas_kernels.native import attention as native_ops
from jax_paged.pallas_kernels.quantization import is_quantized, quantize, row_size

# Kernels are imported where they are called: a CPU has no use for Mosaic, which takes a fifth of a second.
Backend = Literal["auto", "native", "pallas", "pallas_interpret", "reference", "xla"]
Implementation = Literal["native", "pallas", "pallas_interpret", "reference", "xla"]
# Backends that are one module each and take every option.
_COMPLETE: dict[str, Any] = {"native": native_ops, "reference": reference, "xla": xla}


def resolve_backend(backend: str, *, name: str = "backend") -> Implementation:
    """Returns the backend that `backend` stands for on this machine.

    Args:
        backend: "native" (C++ on a CPU), "pallas" (Mosaic GPU kernels), "pallas_interpret" (the same in JAX's
            interpreter, slow), "reference" (plain and differentiable, slow), "xla", or "auto": "native" on a
            CPU if it was built, else "xla". An engine's "auto" may be "pallas" too: see self_check.py.
        name: Name of the caller's argument, for error messages.

    Raises:
        ValueError: If the backend is unknown, is "native" on a machine where it is not built or whose device
            is no CPU, or is "pallas" on a machine without an NVIDIA GPU.
    """
    implementation = _implementation(backend, name)
    device = jax.devices()[0]
    if implementation == "native":
        others = f"allowed on this machine, whose device is {device.device_kind!r}: 'auto' or 'xla'"
        if device.platform != "cpu":
            raise ValueError(f"{name} is 'native', which needs a CPU; {others}")
        if (problem := native.problem()) is not None:
            raise ValueError(f"{name} is 'native', which can't be used: {problem}; {others}")
    if implementation == "pallas":
        if device.platform != "gpu":
            raise ValueError(
                f"{name} is 'pallas', which needs an NVIDIA GPU; allowed on this machine, whose device is "
                f"{device.device_kind!r}: 'auto' or 'native' or 'pallas_interpret' or 'xla'"
            )
        from jax_paged.pallas_kernels import tuning

        tuning.target()
    return implementation


def _implementation(backend: Any, name: str = "backend") -> Implementation:
    if backend not in get_args(Backend):
        raise ValueError(f"{name} is {backend!r}; allowed: {' or '.join(map(repr, get_args(Backend)))}")
    if backend != "auto":
        return backend
    return "native" if jax.default_backend() == "cpu" and native.is_built() else "xla"


def _choose(backend: str, array: Array) -> Implementation:
    """Returns the implementation; a trace may be for another machine, so there its device is not checked."""
    return _implementation(backend) if isinstance(array, Tracer) else resolve_backend(backend)


def write_kv(
    kv_pages: Float[Array, "p 2 k s d"],
    k: Float[Array, "t k d"],
    v: Float[Array, "t k d"],
    slot_mapping: Int[Array, " t"],
    *,
    backend: Backend = "auto",
) -> Float[Array, "p 2 k s d"]:
    """Writes the key and the value of each token into its slot, in place if the pool is donated.

    Args:
        kv_pages: The pool.
        k: Keys, converted to the pool's dtype, or quantised.
        v: Values, as the keys.
        slot_mapping: int32 [T], the slot of each token; slots of P * S or more are not written.
        backend: The implementation, as for resolve_backend.

    Returns:
        The pool with the tokens written.
    """
    _check_pool(kv_pages)
    _check("k", k.shape, (slot_mapping.shape[0], kv_pages.shape[2], _head_dim(kv_pages)))
    _check("v", v.shape, k.shape)
    _check_int32(slot_mapping=slot_mapping)
    implementation = _choose(backend, k)
    k, v = quantize(k, kv_pages.dtype), quantize(v, kv_pages.dtype)
    if implementation in _COMPLETE:
        return _COMPLETE[implementation].write_kv(kv_pages, k, v, slot_mapping)
    from jax_paged.pallas_kernels import write_kv as write_kernel

    interpret = implementation == "pallas_interpret"
    return write_kernel.write_kv(kv_pages, k, v, slot_mapping, interpret=interpret)


def copy_blocks(
    kv_pages: Float[Array, "p 2 k s d"],
    src: Int[Array, " n"],
    dst: Int[Array, " n"],
    *,
    backend: Backend = "auto",
) -> Float[Array, "p 2 k s d"]:
    """Copies whole pages; all are read before any is written.

    With the Pallas backends no page may be in both src and dst.

    Args:
        kv_pages: The pool.
        src: int32 [N], pages to read.
        dst: int32 [N], pages to write, all different; a pair with a page of P or more is skipped.
        backend: The implementation, as for resolve_backend.

    Returns:
        The pool with the pages copied.
    """
    _check_pool(kv_pages)
    _check("dst", dst.shape, src.shape)
    _check_int32(src=src, dst=dst)
    if (implementation := _choose(backend, src)) in _COMPLETE:
        return _COMPLETE[implementation].copy_blocks(kv_pages, src, dst)
    from jax_paged.pallas_kernels import copy_blocks as copy_kernel

    return copy_kernel.copy_blocks(kv_pages, src, dst, interpret=implementation == "pallas_interpret")


def paged_decode(
    q: Float[Array, "b h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    distance_bias: Float[Array, "h n"] | None = None,
    shared_blocks: Int[Array, " b"] | None = None,
    backend: Backend = "auto",
) -> Float[Array, "b h d"]:
    """Attends with one query per sequence, the last token of its context, over the pages of its table.

    Args:
        q: Queries.
        kv_pages: The pool; what dead slots hold, even NaN, never matters.
        block_tables: int32 [B, M], pages in order of position; entries past a context, and before its window,
            may be anything.
        context_lens: int32 [B], tokens attended to; 0 gives an output of exactly 0.
        scale: Factor of the scores, usually head_dim ** -0.5.
        window: Only the last `window` tokens are attended to; None for all.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap); None for no cap.
        sinks: One logit per head that joins the denominator of the softmax and has no value; -inf for none.
        distance_bias: Added to the scaled score of query position i and key position j:
            distance_bias[head, min(i - j, n - 1)]. Not with a soft cap.
        shared_blocks: int32 [B], how many leading pages a sequence has in common with others, 0 for none.
            Sequences with the same number, and the same page there, have all these pages in common, and
            attend to them together; each has at least one token behind them. It changes what is read how
            often, and no result but by rounding. Not with a window.
        backend: The implementation, as for resolve_backend.

    Returns:
        Attention in the dtype of q.

    Source: Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, SOSP 2023.
    """
    _check_attention(q, kv_pages, block_tables, context_lens)
    _check_options(q, window, soft_cap, sinks, distance_bias)
    _check_shared(shared_blocks, context_lens, window)
    _check("block_tables", block_tables.shape[:1], q.shape[:1])
    options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    if (implementation := _choose(backend, q)) in _COMPLETE:
        options |= {"distance_bias": distance_bias, "shared_blocks": shared_blocks}
        return _COMPLETE[implementation].paged_decode(q, kv_pages, block_tables, context_lens, **options)
    options["interpret"] = implementation == "pallas_interpret"
    if shared_blocks is not None:
        from jax_paged.pallas_kernels import cascade

        _check_none(f"{backend} with shared_blocks", distance_bias=distance_bias)
        del options["window"]
        options["shared_blocks"] = shared_blocks
        return cascade.paged_decode(q, kv_pages, block_tables, context_lens, **options)
    options["distance_bias"] = distance_bias
    from jax_paged.pallas_kernels import paged_decode as decode_kernel

    return decode_kernel.paged_decode(q, kv_pages, block_tables, context_lens, **options)


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
    sinks: Float[Array, " h"] | None = None,
    distance_bias: Float[Array, "h n"] | None = None,
    shared_blocks: Int[Array, " b"] | None = None,
    backend: Backend = "auto",
) -> Float[Array, "t h d"]:
    """Attends causally with any number of queries per sequence, the last positions of its context.

    Args:
        q: Queries of all sequences, one sequence after the other.
        kv_pages: The pool; what dead slots hold, even NaN, never matters.
        block_tables: int32 [B, M], pages in order of position; entries past a context, and before its window,
            may be anything.
        context_lens: int32 [B], tokens of each sequence, including its queries.
        query_start_loc: int32 [B + 1]; the rows of sequence b start at query_start_loc[b] and end before
            query_start_loc[b + 1].
        scale: Factor of the scores, usually head_dim ** -0.5.
        window: A query attends to itself and the window - 1 tokens before it; None for all.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap); None for no cap.
        sinks: One logit per head that joins the denominator of the softmax and has no value; -inf for none.
        distance_bias: Added to the scaled score of query position i and key position j:
            distance_bias[head, min(i - j, n - 1)]. Not with a soft cap.
        shared_blocks: As paged_decode takes it; of sequences with several queries it is not looked at. Not
            with the Pallas backends.
        backend: The implementation, as for resolve_backend.

    Returns:
        Attention in the dtype of q; exactly 0 in rows from query_start_loc[B] on.
    """
    _check_attention(q, kv_pages, block_tables, context_lens)
    _check_options(q, window, soft_cap, sinks, distance_bias)
    _check_shared(shared_blocks, context_lens, window)
    _check("query_start_loc", query_start_loc.shape, (block_tables.shape[0] + 1,))
    _check_int32(query_start_loc=query_start_loc)
    options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    options["distance_bias"] = distance_bias
    if (implementation := _choose(backend, q)) in _COMPLETE:
        options["shared_blocks"] = shared_blocks
        attend = _COMPLETE[implementation].ragged_attention
        return attend(q, kv_pages, block_tables, context_lens, query_start_loc, **options)
    _check_none(backend, shared_blocks=shared_blocks)
    from jax_paged.pallas_kernels import ragged_prefill

    options["interpret"] = implementation == "pallas_interpret"
    return ragged_prefill.ragged_attention(
        q, kv_pages, block_tables, context_lens, query_start_loc, **options
    )


def check_inputs(
    num_pages: int,
    page_size: int,
    block_tables: np.ndarray,
    context_lens: np.ndarray,
    query_start_loc: np.ndarray,
    slot_mapping: np.ndarray,
    src: np.ndarray,
    dst: np.ndarray,
) -> None:
    """Asserts on the host what the ops take for granted about their arguments of the same names.

    Raises:
        AssertionError: If a page or slot is out of range, a table is too short for its context, a slot or
            page is written twice, query_start_loc decreases, or copy_blocks both reads and writes a page.
    """
    query_lens, slots = np.diff(query_start_loc), slot_mapping[slot_mapping < num_pages * page_size]
    copied = (src < num_pages) & (dst < num_pages)
    src, dst = src[copied], dst[copied]
    for ok, message in (
        ((block_tables >= 0) & (block_tables < num_pages), "a page of a block table is out of the pool"),
        (context_lens <= block_tables.shape[1] * page_size, "a context is longer than its table"),
        (np.append(query_lens, query_start_loc[0]) >= 0, "query_start_loc decreases"),
        (query_lens <= context_lens, "a sequence has more queries than tokens"),
        (slots >= 0, "a slot is negative"),
        (len(np.unique(slots)) == len(slots), "a slot is written twice"),
        (np.append(src, dst) >= 0, "a page to copy is negative"),
        (len(np.unique(dst)) == len(dst), "a page is written twice"),
        (~np.isin(dst, src), "a page is both read and written"),
    ):
        assert np.all(ok), message


def _check(name: str, shape: tuple[int, ...], allowed: tuple[int, ...]) -> None:
    if tuple(shape) != tuple(allowed):
        raise ValueError(
            f"{name} has shape {tuple(shape)}; allowed with the other arguments: {tuple(allowed)}"
        )


def _check_int32(**arrays: Array) -> None:
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {array.dtype}; allowed: int32")


def _check_pool(kv_pages: Array) -> None:
    if kv_pages.ndim != 5 or kv_pages.shape[1] != 2:
        raise ValueError(
            f"kv_pages has shape {kv_pages.shape}; allowed: [pages, 2, kv_heads, page_size, head_dim]"
        )


def _head_dim(kv_pages: Array) -> int:
    return kv_pages.shape[4] - row_size(0, kv_pages.dtype)


def _check_attention(q: Array, kv_pages: Array, block_tables: Array, context_lens: Array) -> None:
    _check_pool(kv_pages)
    kv_heads, head_dim = kv_pages.shape[2], _head_dim(kv_pages)
    if q.ndim != 3 or q.shape[2] != head_dim or q.shape[1] % kv_heads:
        raise ValueError(
            f"q has shape {q.shape}; allowed with kv_pages {kv_pages.shape}: "
            f"[rows, a multiple of {kv_heads} heads, {head_dim}]"
        )
    allowed = "float32, bfloat16, float16" if is_quantized(kv_pages) else str(kv_pages.dtype)
    if str(q.dtype) not in allowed.split(", "):
        raise ValueError(f"q has dtype {q.dtype}; allowed with kv_pages of {kv_pages.dtype}: {allowed}")
    if block_tables.ndim != 2:
        raise ValueError(f"block_tables has shape {block_tables.shape}; allowed: [sequences, pages]")
    _check("context_lens", context_lens.shape, block_tables.shape[:1])
    _check_int32(block_tables=block_tables, context_lens=context_lens)


def _check_options(
    q: Array,
    window: int | None,
    soft_cap: float | None,
    sinks: Array | None,
    distance_bias: Array | None,
) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; allowed: None or at least 1")
    if sinks is not None:
        _check("sinks", sinks.shape, q.shape[1:2])
    if distance_bias is not None:
        if distance_bias.ndim != 2 or distance_bias.shape[0] != q.shape[1] or distance_bias.shape[1] < 1:
            raise ValueError(
                f"distance_bias has shape {distance_bias.shape}; allowed with q: ({q.shape[1]}, 1 or more)"
            )
        if soft_cap is not None:
            raise ValueError(f"soft_cap is {soft_cap}; allowed with distance_bias: None")


def _check_shared(shared_blocks: Array | None, context_lens: Array, window: int | None) -> None:
    if shared_blocks is not None:
        _check("shared_blocks", shared_blocks.shape, context_lens.shape)
        _check_int32(shared_blocks=shared_blocks)
        if window is not None:
            raise ValueError(f"window is {window}; allowed with shared_blocks: None")


def _check_none(backend: str, **arrays: Array | None) -> None:
    for name, array in arrays.items():
        if array is not None:
            raise ValueError(f"{name} has shape {array.shape}; allowed with backend {backend!r}: None")
