"""The gated delta rule: linear attention whose state per head maps keys to values.

A head has a state S [K, V]. Each token has a query q [K], a key k [K] of length 1, a value v [V], the
logarithm g of a decay, and a learning rate b. A token updates the state and reads its output from it:

    S = exp(g) S
    S = S + k (b (v - k S))
    output = q S

A decode step computes exactly this. Sequences with several tokens in the step are computed in tiles of C
tokens, because then most of the work is in matrix products. Within a tile, the values that all tokens write
follow from the state before the tile by solving a triangular system. The outputs and the state after the tile
follow from these values. The tiles are processed one after the other. No tile has tokens of two sequences:

    sequence a (5 tokens), sequence b (1 token), C = 4
    tokens   a a a a | a - - - | b - - -
    state    from a's slot ->  | from b's slot

Source: Yang et al., Gated Delta Networks, 2024; Parallelizing Linear Transformers with the Delta Rule, 2024.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jax_paged.models.recurrent.recurrence import StepTokens

_TILE_SIZES = 16, 64
_EPSILON = 1e-6


class Tiles(NamedTuple):
    """Division of the tokens of a step into N tiles of C tokens. Each tile has tokens of one sequence only.

    Args:
        sequence: int32 [N], index of each tile's sequence; B for an empty tile.
        start: int32 [N], number of tokens of the sequence that precede the tile in this step.
        tokens: int32 [N, C], indices of the tile's tokens.
        is_token: bool [N, C], False where the tile has fewer tokens.
    """

    sequence: Int[Array, " n"]
    start: Int[Array, " n"]
    tokens: Int[Array, "n c"]
    is_token: Bool[Array, "n c"]


def tiles_of(step: StepTokens) -> Tiles:
    """Returns the tiles of a step. The tile size, 16 to 64 tokens, grows with the tokens per sequence.

    Args:
        step: Assignment of tokens to sequences.
    """
    num_tokens, num_seqs = len(step.sequence), len(step.start) - 1
    least, most = _TILE_SIZES
    size = min(most, max(least, 1 << (num_tokens // num_seqs).bit_length() - 1))
    lens = step.start[1:] - step.start[:-1]
    ends = jnp.cumsum(-(-lens // size))
    tile = jnp.arange(num_tokens // size + min(num_seqs, num_tokens))
    sequence = jnp.sum(tile[:, None] >= ends, axis=1)
    valid = jnp.minimum(sequence, num_seqs - 1)  # an index for empty tiles too
    start = (tile - (ends - -(-lens // size))[valid]) * size
    offset = start[:, None] + jnp.arange(size)
    is_token = (sequence < num_seqs)[:, None] & (offset < lens[valid][:, None])
    return Tiles(sequence, start, jnp.where(is_token, step.start[valid][:, None] + offset, 0), is_token)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class GatedDeltaRule:
    """Rule (see recurrence.py) that advances states float32 [B, 1, H, K, V] by the gated delta rule.

    The dimension of size 1 makes H the second dimension of a sequence's state, the one that devices divide.
    """

    def __call__(self, step: StepTokens, state: Array, *inputs: Array) -> tuple[Array, Array, Array]:
        """Returns the outputs of the tokens and the new states; see Rule.

        Args:
            step: Assignment of tokens to sequences.
            state: float32 [B, 1, H, K, V], state of each sequence before the step.
            *inputs: Queries [T, G, K], keys [T, G, K], values [T, H, V], logarithms of decays [T, H] and
                learning rates [T, H]. Each of the G query and key heads is used by H / G consecutive value
                heads. Queries and keys are normalized here.

        Returns:
            [T, H, V] in the dtype of the values; float32 [B, 1, H, K, V], the states after all tokens; and
            float32 [B, 1, H, K, V], the states after the first `checkpoint_len` tokens.
        """
        q, k, v, decay, rate = (x.astype(jnp.float32) for x in inputs)
        q, k = (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPSILON) for x in (q, k))
        q, k = (jnp.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q * q.shape[-1] ** -0.5, k))
        state = state[:, 0]
        if step.is_decode:
            state = state * jnp.exp(decay)[..., None, None]
            delta = (v - jnp.einsum("bhk,bhkv->bhv", k, state)) * rate[..., None]
            state = state + k[..., None] * delta[..., None, :]
            out, checkpoint = jnp.einsum("bhk,bhkv->bhv", q, state), state
        else:
            out, state, checkpoint = _by_tiles(step, state, q, k, v, decay, rate)
        return out.astype(inputs[2].dtype), state[:, None], checkpoint[:, None]


def _by_tiles(
    step: StepTokens,
    state: Float[Array, "b h k v"],
    q: Float[Array, "t h k"],
    k: Float[Array, "t h k"],
    v: Float[Array, "t h v"],
    decay: Float[Array, "t h"],
    rate: Float[Array, "t h"],
) -> tuple[Array, Array, Array]:
    """Computes sequences with several tokens tile by tile; see the module's docstring.

    The inputs are float32; queries and keys are normalized, and their heads are repeated to H. Returns the
    outputs [T, H, V], the states [B, H, K, V] after all tokens, and the states after the first
    `checkpoint_len` tokens.
    """
    tiles, num_seqs = tiles_of(step), len(state)
    size = tiles.tokens.shape[1]

    def tiled(x: Array) -> Array:
        """Returns [N, H, C, ...], the tokens of each tile, padded with zeros, which change no state."""
        mask = tiles.is_token.reshape(*tiles.is_token.shape, *[1] * (x.ndim - 1))
        return jnp.moveaxis(jnp.where(mask, x[tiles.tokens], 0), 1, 2)

    q, k, v, decay, rate = map(tiled, (q, k, v, decay, rate))
    total = jnp.cumsum(decay, axis=2)  # logarithm of the decay since the start of the tile
    index = jnp.arange(size)
    is_before = index[:, None] >= index
    fading = jnp.exp(jnp.where(is_before, total[..., :, None] - total[..., None, :], -jnp.inf))
    system = jnp.einsum("nhik,nhjk->nhij", k * rate[..., None], k) * fading
    system = jnp.where(index[:, None] > index, system, 0) + jnp.eye(size, dtype=jnp.float32)
    right = jnp.concatenate([v, k * jnp.exp(total)[..., None]], axis=-1) * rate[..., None]
    solved = jax.scipy.linalg.solve_triangular(system, right, lower=True, unit_diagonal=True)
    values, keys = jnp.split(solved, [v.shape[-1]], axis=-1)
    scores = jnp.einsum("nhik,nhjk->nhij", q, k) * fading
    # The number of tokens of the sequence that the checkpoint includes, counted from the start of the tile.
    num_before = step.checkpoint_len.at[tiles.sequence].get(mode="fill", fill_value=0) - tiles.start
    counts = jnp.stack([jnp.sum(tiles.is_token, axis=1), jnp.clip(num_before, 0, size)])
    has_checkpoint = (num_before > 0) & (num_before <= counts[0])
    # The decay up to the last token of the tile, and up to the last one that the checkpoint includes.
    last = jnp.take_along_axis(total[None], jnp.maximum(counts - 1, 0)[:, :, None, None], axis=3)
    factors = jnp.exp(jnp.where(index < counts[:, :, None, None], last - total, -jnp.inf))
    written = k * factors[..., None]  # [2, N, H, C, K]: for all tokens, and for those in the checkpoint
    is_last = tiles.sequence != jnp.roll(tiles.sequence, -1).at[-1].set(-1)
    ends = jnp.where((tiles.sequence < num_seqs) & is_last, tiles.sequence, num_seqs)

    def advance(
        carry: tuple[Array, Array, Array], tile: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array, Array], Array]:
        now, final, checkpoint = carry
        sequence, start, end, checkpoint_index, q, values, keys, scores, written, tile_decays = tile
        now = jnp.where(start == 0, state.at[sequence].get(mode="clip"), now)
        delta = values - keys @ now
        out = q @ now + scores @ delta
        after = now * tile_decays[..., None, None] + jnp.einsum("xhck,hcv->xhkv", written, delta)
        final = final.at[end].set(after[0], mode="drop")
        return (after[0], final, checkpoint.at[checkpoint_index].set(after[1], mode="drop")), out

    tile_decays = jnp.moveaxis(jnp.exp(last[..., 0]), 0, 1)
    per_tile = (
        tiles.sequence,
        tiles.start,
        ends,
        jnp.where(has_checkpoint, tiles.sequence, num_seqs),
        q * jnp.exp(total)[..., None],
    )
    per_tile = *per_tile, values, keys, scores, jnp.moveaxis(written, 0, 1), tile_decays
    (_, final, checkpoint), out = lax.scan(advance, (jnp.zeros_like(state[0]), state, state), per_tile)
    indices = jnp.where(tiles.is_token, tiles.tokens, len(step.sequence))
    flat = jnp.zeros((len(step.sequence), out.shape[1], out.shape[3]), out.dtype)
    return flat.at[indices].set(jnp.moveaxis(out, 1, 2), mode="drop"), final, checkpoint
