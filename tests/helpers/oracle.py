"""Attention over pages in NumPy float64, written from the definitions: what checks every backend."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

# Relative norm error: a few units in the last place of the dtype, times the square root of the sums' length.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 5e-3}


def gather(kv_pages: np.ndarray, table: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys and values [length, K, D] of one sequence in float64; of latents the keys twice."""
    page_size = kv_pages.shape[3]
    slots = [(table[t // page_size], t % page_size) for t in range(length)]
    tokens = np.stack([kv_pages[page, :, :, offset] for page, offset in slots]).astype(np.float64)
    return tokens[:, 0], tokens[:, -1]


def ragged_attention(
    q,
    kv_pages,
    block_tables,
    context_lens,
    query_start_loc,
    *,
    scale,
    window=None,
    soft_cap=None,
    sinks=None,
    distance_bias=None,
    value_dim=None,
):
    """Attention of every query row; 0 in rows that no sequence has."""
    q, kv_pages = np.asarray(q, np.float64), np.asarray(kv_pages).astype(np.float64)
    out = np.zeros(q[:, :, :value_dim].shape)
    group = q.shape[1] // kv_pages.shape[2]
    for b, length in enumerate(np.asarray(context_lens)):
        first, last = query_start_loc[b], query_start_loc[b + 1]
        if last == first or length == 0:
            continue
        keys, values = gather(kv_pages, np.asarray(block_tables)[b], length)
        keys, values = (np.repeat(x, group, axis=1) for x in (keys, values))
        if window is not None:  # tokens that no row attends to may be anything
            out_of_window = max(0, length - (last - first) - window + 1)
            keys[:out_of_window], values[:out_of_window] = 0, 0
        scores = np.einsum("qhd,thd->hqt", q[first:last], keys) * scale
        if soft_cap is not None:
            scores = np.tanh(scores / soft_cap) * soft_cap
        position = length - (last - first) + np.arange(last - first)[:, None]
        token = np.arange(length)[None]
        live = token <= position
        if distance_bias is not None:
            distance = np.clip(position - token, 0, distance_bias.shape[1] - 1)
            scores += np.asarray(distance_bias, np.float64)[:, distance]
        if window is not None:
            live &= token > position - window
        scores = np.where(live, scores, -np.inf)
        largest = scores.max(-1, keepdims=True)
        probs = np.exp(scores - largest)
        total = probs.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(np.asarray(sinks, np.float64)[:, None, None] - largest)
        out[first:last] = np.einsum("hqt,thd->qhd", probs / total, values[:, :, :value_dim])
    return out


def paged_decode(q, kv_pages, block_tables, context_lens, **options):
    """Attention of one query per sequence; 0 where there is no context."""
    start = np.arange(len(context_lens) + 1)
    return ragged_attention(q, kv_pages, block_tables, context_lens, start, **options)


# An id of no page: what a block table may hold where nothing is attended to.
OUT_OF_POOL = 10**6


def make_case(lens, *, heads, kv_heads, head_dim, page_size, dtype, query_lens=None, seed=0, parts=2):
    """Makes a pool whose dead slots are all NaN, block tables over permuted pages, and queries.

    With parts=1 it is a pool of latents. Past a context its table holds the null page, live pages of the
    batch, and ids outside of the pool.
    """
    rng = np.random.default_rng(seed)
    columns = max(1, -(-max(lens) // page_size) + 2)
    needed = sum(-(-n // page_size) for n in lens)
    num_pages = needed + 5
    pool = np.full((num_pages, parts, kv_heads, page_size, head_dim), np.nan, np.float32)
    pages = iter(1 + rng.permutation(num_pages - 1))
    tables = np.zeros((len(lens), columns), np.int32)
    for b, n in enumerate(lens):
        for column in range(-(-n // page_size)):
            page = tables[b, column] = next(pages)
            used = min(page_size, n - column * page_size)
            pool[page, :, :, :used] = rng.normal(size=(parts, kv_heads, used, head_dim))
    live_pages = tables[tables > 0]
    for b, n in enumerate(lens):
        dead = tables[b, -(-n // page_size) :]
        dead[:] = rng.choice([0, OUT_OF_POOL, *live_pages], len(dead))
    query_lens = [1] * len(lens) if query_lens is None else query_lens
    start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    q = rng.normal(size=(int(start[-1]), heads, head_dim))
    # device_put compiles nothing, however many shapes there are.
    arrays = (q.astype(jnp.dtype(dtype)), pool.astype(jnp.dtype(dtype)), tables, np.array(lens, np.int32))
    return *jax.device_put(arrays), start


POOL_DTYPES = {"int8": np.int8, "fp8_e4m3": np.uint8}


def quantized(x, kind):
    """Returns what each row of numbers is stored as, and what that stands for in float64."""
    x = np.asarray(x).astype(np.float64)
    largest = np.abs(x).max(-1, keepdims=True)
    is_finite = np.isfinite(largest)
    # frexp's fractions are from 0.5 up to 1.
    top = np.frexp(np.where(is_finite, largest, 1))[1] - 1 - {"int8": 6, "fp8_e4m3": 7}[kind]
    scale = np.where(largest == 0, 0, np.where(is_finite, np.clip(top + 127, 0, 254), 255))
    numbers = np.where(is_finite, x, 0) / 2.0 ** np.where(is_finite, scale - 127, 0)
    if kind == "int8":
        numbers = np.clip(np.rint(numbers), -128, 127).astype(np.int8)
    else:
        numbers = numbers.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    factor = np.where(scale == 0, 0, np.where(is_finite, 2.0 ** (scale - 127), np.nan))
    rows = np.concatenate([numbers.view(np.uint8), scale.astype(np.uint8)], axis=-1)
    return rows.view(POOL_DTYPES[kind]), numbers.astype(np.float64) * factor


def tiled(rows):
    """Returns rows [..., S, D + 1] as a pool keeps them: the numbers of all S rows, then their scales."""
    *others, size, row = rows.shape
    numbers = rows[..., :-1].reshape(*others, size * (row - 1))
    return np.concatenate([numbers, rows[..., -1]], axis=-1).reshape(rows.shape)


def relative_error(got, want):
    got = np.asarray(got).astype(np.float64)
    assert np.isfinite(got).all()
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
