"""The public operations on the KV cache: each checks its arguments, chooses a backend and calls it.

The pool of a layer is an array [P, 2, K, S, D]: P pages of S tokens each, keys (index 0) and values (index
1), K kv heads, head dimension D. The tile [S, D] of one page, one kv head and either keys or values is
contiguous in memory. "Page" means the same as "block" in the scheduler. The slot of a token is page * S +
offset in the page:

    page 0 (null)      page 1             page 2                     slots of page 2, S = 4
    +---------------+  +---------------+  +---------------+
    | K head 0 [S,D]|  | K head 0 [S,D]|  | K head 0 [S,D]|   ->    8 9 10 11
    | K head 1 [S,D]|  | K head 1 [S,D]|  | K head 1 [S,D]|
    | V head 0 [S,D]|  | V head 0 [S,D]|  | V head 0 [S,D]|
    | V head 1 [S,D]|  | V head 1 [S,D]|  | V head 1 [S,D]|
    +---------------+  +---------------+  +---------------+

There are two other kinds of pool. A quantized pool (int8, or uint8 with the bits of fp8_e4m3) has tiles [S, D
+ 1] of bytes, as described in quantization.py. A latent pool has the shape [P, 1, K, S, D] and stores keys
only. The first `value_dim` elements of a key are also the token's value. This is how multi-head latent
attention works, where all query heads share one kv head.

A dead slot is a slot in a page of the block table whose token is not attended to, because it lies past the
end of the context or before the sliding window. Its contents, even NaN, do not influence any result.
"""

from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels import checks, native, reference, xla
from jax_paged.pallas_kernels.jax_settings import with_default_settings
from jax_paged.pallas_kernels.native import attention as native_ops
from jax_paged.pallas_kernels.quantization import quantize

# The GPU kernels are imported only when they are called. Importing Mosaic takes 0.2 s, and CPUs do not need
# it.
Backend = Literal["auto", "native", "pallas", "pallas_interpret", "reference", "xla"]
Implementation = Literal["native", "pallas", "pallas_interpret", "reference", "xla"]
# Backends that implement every operation with every option, each in a single module.
_COMPLETE: dict[str, Any] = {"native": native_ops, "reference": reference, "xla": xla}


def resolve_backend(backend: str, *, name: str = "backend") -> Implementation:
    """Returns the implementation to which `backend` resolves on this machine.

    Args:
        backend: "native" (C++ on a CPU), "pallas" (Mosaic GPU kernels), "pallas_interpret" (the same kernels
            in JAX's interpreter, slow), "reference" (plain and differentiable, slow), "xla" (plain JAX), or
            "auto". Here "auto" means "native" on a CPU if the native library is available, else "xla". The
            engine resolves its own "auto" to "pallas" if self_check/runner.py has verified the kernels on
            this GPU.
        name: Name of the caller's argument, for error messages.

    Raises:
        ValueError: If the backend is unknown; is "native" on a device that is not a CPU, or without the
            native library; or is "pallas" on a machine without a supported NVIDIA GPU.
    """
    implementation = _implementation(backend, name)
    device = jax.devices()[0]
    if implementation == "native":
        others = f"`{name}` must be 'auto' or 'xla' on this machine, whose device is {device.device_kind!r},"
        if device.platform != "cpu":
            raise ValueError(f"{others} got 'native', which needs a CPU")
        if (problem := native.problem()) is not None:
            raise ValueError(f"{others} got 'native', which can't be used: {problem}")
    if implementation == "pallas":
        if device.platform != "gpu":
            raise ValueError(
                f"`{name}` must be one of 'auto', 'native', 'pallas_interpret', 'xla' on this machine, whose "
                f"device is {device.device_kind!r}, got 'pallas', which needs an NVIDIA GPU"
            )
        from jax_paged.pallas_kernels.gpu import tuning

        tuning.target()
    return implementation


def _implementation(backend: Any, name: str = "backend") -> Implementation:
    if backend not in get_args(Backend):
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(repr, get_args(Backend)))}, got {backend!r}"
        )
    if backend != "auto":
        return backend
    return "native" if jax.default_backend() == "cpu" and native.is_built() else "xla"


def _choose(backend: str, array: Array) -> Implementation:
    """Returns the implementation for `backend`.

    The device is not checked inside a trace, because the trace may be lowered for another machine.
    """
    return _implementation(backend) if isinstance(array, Tracer) else resolve_backend(backend)


@with_default_settings
def write_kv(
    kv_pages: Float[Array, "p n k s d"],
    k: Float[Array, "t k d"],
    v: Float[Array, "t k d"] | None,
    slot_mapping: Int[Array, " t"],
    *,
    backend: Backend = "auto",
) -> Float[Array, "p n k s d"]:
    """Writes the key and value of each token into its slot, in place if the pool is donated.

    Args:
        kv_pages: The pool.
        k: Keys. They are converted to the pool's dtype, or quantized if the pool is quantized.
        v: Values, with the shape and dtype of k; None for a latent pool.
        slot_mapping: int32 [T], the slot of each token. Tokens whose slot is P * S or more are not written.
        backend: The implementation, see resolve_backend.

    Returns:
        The pool with the tokens written.
    """
    checks.check_pool(kv_pages)
    checks.check_shape("k", k.shape, (slot_mapping.shape[0], kv_pages.shape[2], checks.head_dim_of(kv_pages)))
    checks.check_values(kv_pages, k, v)
    checks.check_int32(slot_mapping=slot_mapping)
    checks.check_slots(kv_pages, slot_mapping)
    implementation = _choose(backend, k)
    k = quantize(k, kv_pages.dtype)
    v = None if v is None else quantize(v, kv_pages.dtype)
    if implementation in _COMPLETE:
        return _COMPLETE[implementation].write_kv(kv_pages, k, v, slot_mapping)
    checks.check_not_latent(backend, kv_pages)
    from jax_paged.pallas_kernels.gpu import write_kv as write_kernel

    interpret = implementation == "pallas_interpret"
    return write_kernel.write_kv(kv_pages, k, v, slot_mapping, interpret=interpret)


@with_default_settings
def copy_blocks(
    kv_pages: Float[Array, "p n k s d"],
    src: Int[Array, " c"],
    dst: Int[Array, " c"],
    *,
    backend: Backend = "auto",
) -> Float[Array, "p n k s d"]:
    """Copies whole pages, as if all sources were read before any destination is written.

    With the Pallas backends no page may be in both src and dst.

    Args:
        kv_pages: The pool.
        src: int32 [C], pages to read.
        dst: int32 [C], pages to write, all different. A pair is skipped if either of its pages is P or more.
        backend: The implementation, see resolve_backend.

    Returns:
        The pool with the pages copied.
    """
    checks.check_pool(kv_pages)
    checks.check_shape("dst", dst.shape, src.shape)
    checks.check_int32(src=src, dst=dst)
    implementation = _choose(backend, src)
    checks.check_copies(kv_pages, src, dst, may_overlap=implementation in _COMPLETE)
    if implementation in _COMPLETE:
        return _COMPLETE[implementation].copy_blocks(kv_pages, src, dst)
    checks.check_not_latent(backend, kv_pages)
    from jax_paged.pallas_kernels.gpu import copy_blocks as copy_kernel

    return copy_kernel.copy_blocks(kv_pages, src, dst, interpret=implementation == "pallas_interpret")


@with_default_settings
def paged_decode(
    q: Float[Array, "b h d"],
    kv_pages: Float[Array, "p n k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    distance_bias: Float[Array, "h n"] | None = None,
    shared_blocks: Int[Array, " b"] | None = None,
    value_dim: int | None = None,
    backend: Backend = "auto",
) -> Float[Array, "b h v"]:
    """Computes the attention of one query per sequence, its last token, over the pages in its block table.

    Args:
        q: Queries.
        kv_pages: The pool. The contents of dead slots do not matter.
        block_tables: int32 [B, M], pages in order of position. Entries past the context, or entirely before
            the window, may have any value.
        context_lens: int32 [B], number of tokens attended to; the output is exactly 0 for a length of 0.
        scale: Factor of the scores, usually head_dim ** -0.5.
        window: Sliding window: only the last `window` tokens are attended to; None for all tokens.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap); None for no cap.
        sinks: Attention sinks: one logit per head that is added to the denominator of the softmax and has no
            value; -inf for no sink.
        distance_bias: Table of biases: distance_bias[head, min(i - j, n - 1)] is added to the scaled score of
            query position i and key position j. Not allowed with a soft cap.
        shared_blocks: int32 [B], number of leading pages that a sequence shares with other sequences, 0 for
            none. If two sequences have the same number n and the same n-th page, they must share all n pages.
            Their queries attend to the shared pages together, so that the pages are read once for several
            sequences (cascade attention). This changes the results by rounding only. Each of these sequences
            must have at least one token after the shared pages. Not allowed with a window; with the Pallas
            backends, not allowed with a distance bias.
        value_dim: For a latent pool, the number of leading elements of a key that are its value; None for a
            pool of keys and values. Not supported by the Pallas backends.
        backend: The implementation, see resolve_backend.

    Returns:
        The attention output, in the dtype of q. V is value_dim, or D if value_dim is None.

    Source: Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, SOSP 2023.
    """
    checks.check_attention(q, kv_pages, block_tables, context_lens)
    checks.check_options(q, scale, window, soft_cap, sinks, distance_bias)
    checks.check_value_dim(kv_pages, value_dim)
    checks.check_shared(shared_blocks, context_lens, window)
    checks.check_shape("block_tables", block_tables.shape[:1], q.shape[:1])
    checks.check_pages(kv_pages, block_tables, context_lens, window=window)
    options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    if (implementation := _choose(backend, q)) in _COMPLETE:
        options |= {"distance_bias": distance_bias, "shared_blocks": shared_blocks, "value_dim": value_dim}
        return _COMPLETE[implementation].paged_decode(q, kv_pages, block_tables, context_lens, **options)
    checks.check_not_latent(backend, kv_pages)
    options["interpret"] = implementation == "pallas_interpret"
    if shared_blocks is not None:
        from jax_paged.pallas_kernels.gpu import cascade

        checks.check_none(f"{backend} with shared_blocks", distance_bias=distance_bias)
        del options["window"]
        options["shared_blocks"] = shared_blocks
        return cascade.paged_decode(q, kv_pages, block_tables, context_lens, **options)
    options["distance_bias"] = distance_bias
    from jax_paged.pallas_kernels.gpu import paged_decode as decode_kernel

    return decode_kernel.paged_decode(q, kv_pages, block_tables, context_lens, **options)


@with_default_settings
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
    backend: Backend = "auto",
) -> Float[Array, "t h v"]:
    """Computes causal attention for any number of queries per sequence, the last tokens of its context.

    A batch may mix prefill chunks of many queries with decodes of one query.

    Args:
        q: Queries of all sequences, one sequence after the other.
        kv_pages: The pool. The contents of dead slots do not matter.
        block_tables: int32 [B, M], pages in order of position. Entries past the context, or entirely before
            the window, may have any value.
        context_lens: int32 [B], tokens of each sequence, including its queries.
        query_start_loc: int32 [B + 1]; the rows of sequence b are query_start_loc[b] to query_start_loc[b +
            1] - 1.
        scale: Factor of the scores, usually head_dim ** -0.5.
        window: Sliding window: a query attends to itself and the window - 1 tokens before it; None for all
            tokens.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap); None for no cap.
        sinks: Attention sinks: one logit per head that is added to the denominator of the softmax and has no
            value; -inf for no sink.
        distance_bias: Table of biases: distance_bias[head, min(i - j, n - 1)] is added to the scaled score of
            query position i and key position j. Not allowed with a soft cap.
        shared_blocks: Number of shared leading pages per sequence, see paged_decode. Entries of sequences
            with several queries are ignored. Not supported by the Pallas backends.
        value_dim: Size of the values in a latent pool, see paged_decode.
        backend: The implementation, see resolve_backend.

    Returns:
        The attention output, in the dtype of q, [T, H, V] as in paged_decode. It is exactly 0 in the padding
        rows, from row query_start_loc[B] on.
    """
    checks.check_attention(q, kv_pages, block_tables, context_lens)
    checks.check_options(q, scale, window, soft_cap, sinks, distance_bias)
    checks.check_value_dim(kv_pages, value_dim)
    checks.check_shared(shared_blocks, context_lens, window)
    checks.check_shape("query_start_loc", query_start_loc.shape, (block_tables.shape[0] + 1,))
    checks.check_int32(query_start_loc=query_start_loc)
    checks.check_queries(q, context_lens, query_start_loc)
    checks.check_pages(kv_pages, block_tables, context_lens, query_start_loc, window=window)
    options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    options["distance_bias"] = distance_bias
    if (implementation := _choose(backend, q)) in _COMPLETE:
        options |= {"shared_blocks": shared_blocks, "value_dim": value_dim}
        attend = _COMPLETE[implementation].ragged_attention
        return attend(q, kv_pages, block_tables, context_lens, query_start_loc, **options)
    checks.check_not_latent(backend, kv_pages)
    checks.check_none(backend, shared_blocks=shared_blocks)
    from jax_paged.pallas_kernels.gpu import ragged_prefill

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
    """Asserts the preconditions of the ops on the host, where the values of their arguments are known.

    The parameters have the names of the ops' parameters.

    Args:
        num_pages: Pages in the pool.
        page_size: Tokens per page.
        block_tables: int32 [B, M].
        context_lens: int32 [B].
        query_start_loc: int32 [B + 1].
        slot_mapping: int32 [T].
        src: int32 [C].
        dst: int32 [C].

    Raises:
        AssertionError: If a page or slot is out of range, a table is too short for its context, a sequence
            has more queries than tokens, a slot or page is written twice, query_start_loc decreases, or
            copy_blocks both reads and writes a page.
    """
    query_lens, slots = np.diff(query_start_loc), slot_mapping[slot_mapping < num_pages * page_size]
    copied = (src < num_pages) & (dst < num_pages)
    src, dst = src[copied], dst[copied]
    for ok, message in (
        ((block_tables >= 0) & (block_tables < num_pages), "a page in a block table is outside of the pool"),
        (context_lens <= block_tables.shape[1] * page_size, "a context is longer than its block table"),
        (np.append(query_lens, query_start_loc[0]) >= 0, "query_start_loc decreases"),
        (query_lens <= context_lens, "a sequence has more queries than tokens"),
        (slots >= 0, "a slot is negative"),
        (len(np.unique(slots)) == len(slots), "a slot is written twice"),
        (np.append(src, dst) >= 0, "a page to copy is negative"),
        (len(np.unique(dst)) == len(dst), "a page is written twice"),
        (~np.isin(dst, src), "a page is both read and written"),
    ):
        assert np.all(ok), message
