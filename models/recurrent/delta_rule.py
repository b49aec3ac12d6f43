"""The gated delta rule: a state that forgets, and learns which value goes with which key.

With state S [K, V] of a head, and of each token a query q and a key k of length 1, a value v, a decay g and a
learning rate b:

    S = exp(g) S;    S = S + k (b (v - k S));    what the token gets: q S

Rows of several tokens are computed a tile of tokens at a time. Within a tile, what all tokens write follows
from S in front of it by a triangular system, and S behind it from that: the products are those of matrices.

    row a (5 tokens), row b (1)        tokens   a a a a | a - - - | b - - -        tiles of 4
                                       S        zeros -> S -------> from b's slot

Source: Yang et al., Gated Delta Networks, 2024; Parallelizing Linear Transformers with the Delta Rule, 2024.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jax_paged.models.recurrent.recurrence import TokenRows

_TILE_SIZES = 16, 64
_EPSILON = 1e-6


class Tiles(NamedTuple):
    """How the tokens of rows are divided into N tiles of C tokens, none of which has tokens of two rows.

    Args:
        row: int32 [N], the row of each tile; B of one that is empty.
        start: int32 [N], how many tokens of the row come before it.
        tokens: int32 [N, C], the tokens in it.
        is_token: Whether it has so many tokens.
    """

    row: Int[Array, " n"]
    start: Int[Array, " n"]
    tokens: Int[Array, "n c"]
    is_token: Bool[Array, "n c"]


def tiles_of(rows: TokenRows) -> Tiles:
    """Returns the tiles of rows; the more tokens they have, the larger."""
    num_tokens, num_rows = len(rows.row), len(rows.first) - 1
    least, most = _TILE_SIZES
    size = min(most, max(least, 1 << (num_tokens // num_rows).bit_length() - 1))
    lens = rows.first[1:] - rows.first[:-1]
    ends = jnp.cumsum(-(-lens // size))
    tile = jnp.arange(num_tokens // size + min(num_rows, num_tokens))
    row = jnp.sum(tile[:, None] >= ends, axis=1)
    own = jnp.minimum(row, num_rows - 1)
    start = (tile - (ends - -(-lens // size))[own]) * size
    place = start[:, None] + jnp.arange(size)
    is_token = (row < num_rows)[:, None] & (place < lens[own][:, None])
    return Tiles(row, start, jnp.where(is_token, rows.first[own][:, None] + place, 0), is_token)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class GatedDeltaRule:
    """Advances states [B, 1, H, K, V], in float32; see the Rule of recurrence.py."""

    def __call__(self, rows: TokenRows, state: Array, *inputs: Array) -> tuple[Array, Array, Array]:
        """Returns what each token gets, [T, H, V].

        Args:
            rows: How the tokens are divided.
            state: In front of each row.
            *inputs: Queries [T, G, K], keys [T, G, K], values [T, H, V], the logarithm of decays [T, H] and
                learning rates [T, H]; each of G heads of keys serves H / G neighbouring heads of values.
        """
        q, k, v, decay, rate = (x.astype(jnp.float32) for x in inputs)
        q, k = (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPSILON) for x in (q, k))
        q, k = (jnp.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q * q.shape[-1] ** -0.5, k))
        state = state[:, 0]
        if rows.is_decode:
            state = state * jnp.exp(decay)[..., None, None]
            delta = (v - jnp.einsum("bhk,bhkv->bhv", k, state)) * rate[..., None]
            state = state + k[..., None] * delta[..., None, :]
            out, kept = jnp.einsum("bhk,bhkv->bhv", q, state), state
        else:
            out, state, kept = _by_tiles(rows, state, q, k, v, decay, rate)
        return out.astype(inputs[2].dtype), state[:, None], kept[:, None]


def _by_tiles(
    rows: TokenRows,
    state: Float[Array, "b h k v"],
    q: Float[Array, "t h k"],
    k: Float[Array, "t h k"],
    v: Float[Array, "t h v"],
    decay: Float[Array, "t h"],
    rate: Float[Array, "t h"],
) -> tuple[Array, Array, Array]:
    tiles, num_rows = tiles_of(rows), len(state)
    size = tiles.tokens.shape[1]

    def tiled(x: Array) -> Array:
        """Returns rows of tokens as [N, H, C, ...], zeros where there is no token: these change no state."""
        mask = tiles.is_token.reshape(*tiles.is_token.shape, *[1] * (x.ndim - 1))
        return jnp.moveaxis(jnp.where(mask, x[tiles.tokens], 0), 1, 2)

    q, k, v, decay, rate = map(tiled, (q, k, v, decay, rate))
    total = jnp.cumsum(decay, axis=2)  # since the tile began
    place = jnp.arange(size)
    is_before = place[:, None] >= place
    fading = jnp.exp(jnp.where(is_before, total[..., :, None] - total[..., None, :], -jnp.inf))
    system = jnp.einsum("nhik,nhjk->nhij", k * rate[..., None], k) * fading
    system = jnp.where(place[:, None] > place, system, 0) + jnp.eye(size, dtype=jnp.float32)
    right = jnp.concatenate([v, k * jnp.exp(total)[..., None]], axis=-1) * rate[..., None]
    solved = jax.scipy.linalg.solve_triangular(system, right, lower=True, unit_diagonal=True)
    values, keys = jnp.split(solved, [v.shape[-1]], axis=-1)
    scores = jnp.einsum("nhik,nhjk->nhij", q, k) * fading
    # Tokens of a tile that come before the checkpoint; the last of them fades what was there before.
    num_before = rows.num_kept.at[tiles.row].get(mode="fill", fill_value=0) - tiles.start
    counts = jnp.stack([jnp.sum(tiles.is_token, axis=1), jnp.clip(num_before, 0, size)])
    is_kept = (num_before > 0) & (num_before <= counts[0])
    last = jnp.take_along_axis(total[None], jnp.maximum(counts - 1, 0)[:, :, None, None], axis=3)
    factors = jnp.exp(jnp.where(place < counts[:, :, None, None], last - total, -jnp.inf))
    written = k * factors[..., None]  # [2, N, H, C, K]
    has_row = tiles.row < num_rows
    ends = jnp.where(has_row & (tiles.row != jnp.roll(tiles.row, -1).at[-1].set(-1)), tiles.row, num_rows)

    def advance(
        carry: tuple[Array, Array, Array], tile: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array, Array], Array]:
        now, ended, kept = carry
        row, start, end, kept_row, q, values, keys, scores, written, fades = tile
        now = jnp.where(start == 0, state.at[row].get(mode="clip"), now)
        delta = values - keys @ now
        out = q @ now + scores @ delta
        after = now * fades[..., None, None] + jnp.einsum("xhck,hcv->xhkv", written, delta)
        ended = ended.at[end].set(after[0], mode="drop")
        return (after[0], ended, kept.at[kept_row].set(after[1], mode="drop")), out

    fades = jnp.moveaxis(jnp.exp(last[..., 0]), 0, 1)
    over = (
        tiles.row,
        tiles.start,
        ends,
        jnp.where(is_kept, tiles.row, num_rows),
        q * jnp.exp(total)[..., None],
    )
    over = *over, values, keys, scores, jnp.moveaxis(written, 0, 1), fades
    (_, ended, kept), out = lax.scan(advance, (jnp.zeros_like(state[0]), state, state), over)
    places = jnp.where(tiles.is_token, tiles.tokens, len(rows.row))
    flat = jnp.zeros((len(rows.row), out.shape[1], out.shape[3]), out.dtype)
    return flat.at[places].set(jnp.moveaxis(out, 1, 2), mode="drop"), ended, kept
