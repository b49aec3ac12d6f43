"""What a layer caches, what its attention needs to know of a batch, and attention without a cache.

A padded batch of T token rows holds B sequences one after the other (here T = 8, B = 4, one sequence unused):

    token row        0   1 | 2   3   4 | 5 | 6   7
    sequence         a   a | b   b   b | c | -   -
    query_start_loc  0       2           5   6   6     (B + 1 entries; an unused sequence is empty)
    context_lens     9       3           41  0         (tokens attended to, including this step's)
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jax_paged.models.kv_location import Place
from jax_paged.models.parallel.sharding import TENSOR, DeviceGrid
from jax_paged.pallas_kernels import ops

Backend = ops.Implementation
# How devices share the arrays of the pool, [P, N, K, S, D], and token rows with heads, [T, H, D].
POOL_SPEC, HEADS_SPEC = PartitionSpec(None, None, TENSOR), PartitionSpec(None, TENSOR)


class Attend(Protocol):
    """Attention of one's own in place of the kernels, traced into the step: a pure function of arrays."""

    def __call__(
        self,
        q: Float[Array, "t h d"],
        kv_pages: Float[Array, "p 2 k s d"],
        block_tables: Int[Array, "b m"],
        context_lens: Int[Array, " b"],
        query_start_loc: Int[Array, " b1"],
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Float[Array, " h"] | None = None,
        distance_bias: Float[Array, "h n"] | None = None,
    ) -> Float[Array, "t h d"]:
        """Returns the attention of every token row; the arguments are those of ops.ragged_attention.

        Of the pages of a quantised cache, quantization.rows_of and dequantize make numbers. Of a layer with a
        LatentAttentionSpec there is one argument more, its value_dim.

        This step's keys and values are in the pool already. A row of padding may get anything finite. Where
        a model is divided among devices, each of them attends with its own heads.
        """
        ...


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "positions",
        "slot_mapping",
        "block_tables",
        "context_lens",
        "query_start_loc",
        "shared_blocks",
        "state_slots",
        "mrope_positions",
    ],
    meta_fields=["is_decode", "backend", "places", "is_row_by_row", "attend", "grid"],
)
@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of a padded batch stand, and where their keys and values are stored.

    Layers that cache the same tokens share block tables: they form a cache group, and there are G groups.

    Args:
        positions: int32 [T], position of each token in its sequence; 0 in padding.
        slot_mapping: int32 [G, T], block_id * block_size + offset of the slot for each token's key and value;
            num_blocks * block_size or more in padding, which is not written.
        block_tables: int32 [G, B, M], block ids of each sequence, padded with the null block 0, which also
            replaces blocks that have left a window.
        context_lens: int32 [G, B], tokens of each sequence, including this step's; 0 for unused sequences.
            In a cache group of cross attention, tokens that the encoder has read.
        query_start_loc: int32 [B + 1], first token row of each sequence.
        is_decode: Static; True if T == B and token row b is the only one of sequence b.
        backend: Static; which kernels attend.
        places: Static; of each entry of the model's kv_cache_specs().
        is_row_by_row: Static; whether every token row attends as a decode of its own, so that its sums depend
            neither on the rows beside it nor on where the chunks of its prompt begin.
        attend: Static; what attends in the backend's place, None for the backend.
        grid: Static; the devices that heads are divided among, None for one.
        shared_blocks: int32 [B], leading blocks that sequences of one token row attend to together, as
            ops.paged_decode has them, in the groups without a window; None if none ever do.
        state_slots: int32 [3, B], the slot of each sequence's states, that of the checkpoint that the step
            keeps of them, and how many of its tokens come before that; slots that don't exist are not written
            to. None if no layer keeps a state.
        mrope_positions: int32 [3, T], as ForwardContext has them.
    """

    positions: Int[Array, " t"]
    slot_mapping: Int[Array, "g t"]
    block_tables: Int[Array, "g b m"]
    context_lens: Int[Array, "g b"]
    query_start_loc: Int[Array, " b1"]
    is_decode: bool
    backend: Backend
    places: tuple[Place, ...]
    is_row_by_row: bool = False
    attend: Attend | None = None
    grid: DeviceGrid | None = None
    shared_blocks: Int[Array, " b"] | None = None
    state_slots: Int[Array, "3 b"] | None = None
    mrope_positions: Int[Array, "3 t"] | None = None

    def of_token_rows(self, group: int, *, is_causal: bool) -> tuple[Int[Array, "t m"], Int[Array, " t"]]:
        """Returns the block table of each token row, and how many tokens it attends to; 0 in padding."""
        tables, lens = self.block_tables[group], self.context_lens[group]
        if self.is_decode:
            return tables, lens
        rows = jnp.arange(self.positions.shape[0])
        seq = jnp.sum(rows[:, None] >= self.query_start_loc[1:], axis=1)
        is_padding = seq >= lens.shape[0]
        seq = jnp.minimum(seq, lens.shape[0] - 1)
        behind = self.query_start_loc[seq + 1] - 1 - rows if is_causal else 0
        return tables[seq], jnp.where(is_padding, 0, lens[seq] - behind)


@dataclasses.dataclass(frozen=True)
class FullAttentionSpec:
    """A layer that caches the keys and values of every token of a sequence.

    Args:
        num_kv_heads: Number of key and value heads.
        head_dim: Size of a head.
    """

    num_kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class SlidingWindowSpec:
    """A layer whose tokens attend to the latest tokens only: blocks before the window are freed.

    Args:
        num_kv_heads: Number of key and value heads.
        head_dim: Size of a head.
        window: Tokens that a token attends to, including itself.
    """

    num_kv_heads: int
    head_dim: int
    window: int


@dataclasses.dataclass(frozen=True)
class CrossAttentionSpec:
    """A layer that attends to an encoder's output, which is written once per request and then only read.

    Args:
        num_kv_heads: Number of key and value heads.
        head_dim: Size of a head.
    """

    num_kv_heads: int
    head_dim: int


class StateArray(NamedTuple):
    """What a layer keeps of a sequence.

    Args:
        shape: At least two dimensions; devices divide the second.
        dtype: None for that of the model.
    """

    shape: tuple[int, ...]
    dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """A layer that keeps arrays of fixed shapes per sequence, such as a recurrence (see recurrence.py).

    Args:
        arrays: What it keeps.
    """

    arrays: tuple[StateArray, ...]


@dataclasses.dataclass(frozen=True)
class LatentAttentionSpec:
    """A layer of multi-head latent attention: it caches one vector per token, which all heads attend to.

    The vector is the key, and its first numbers are the value. Where devices share the heads, each has it.

    Args:
        head_dim: Numbers of the vector.
        value_dim: How many of them are the value.

    Source: DeepSeek-AI, DeepSeek-V2, 2024.
    """

    head_dim: int
    value_dim: int
    num_kv_heads: ClassVar[int] = 1


AttentionSpec = FullAttentionSpec | SlidingWindowSpec | CrossAttentionSpec | LatentAttentionSpec
KVCacheSpec = AttentionSpec | StateSpec


def window_of(spec: KVCacheSpec) -> int | None:
    """Returns the window of a layer in tokens; None if its tokens attend to all before them."""
    return spec.window if isinstance(spec, SlidingWindowSpec) else None


def value_dim_of(spec: KVCacheSpec) -> int | None:
    """Returns how many numbers of a key are its value; None if values are cached beside the keys."""
    return spec.value_dim if isinstance(spec, LatentAttentionSpec) else None


def num_parts(spec: KVCacheSpec) -> int:
    """Returns the parts of a layer's pool: 2 for keys and values, 1 for latents."""
    return 2 if value_dim_of(spec) is None else 1


def dense_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    distance_bias: Float[Array, "h n"] | None = None,
) -> Float[Array, "b t h d"]:
    """Causal attention of a dense batch without a cache, which trains models and checks the paged path.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        scale: Factor of the scores.
        window: Tokens that a token attends to, including itself; None for all.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap); None for no cap.
        sinks: One logit per head that joins the denominator of the softmax and has no value.
        distance_bias: Added to the score of query i and key j: distance_bias[head, min(i - j, n - 1)].

    Returns:
        The attention of every token.
    """
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    live = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    bias = None
    if distance_bias is not None:
        bias = distance_bias[None, :, jnp.clip(distance, 0, distance_bias.shape[1] - 1)].astype(q.dtype)
    if soft_cap is None and sinks is None:
        return jax.nn.dot_product_attention(q, k, v, bias, live[None, None], scale=scale)
    assert bias is None, "no family has a bias beside a soft cap or sinks"
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    scores = jnp.where(live, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column.astype(jnp.float32)], axis=-1)
    weights = jax.nn.softmax(scores)[..., : k.shape[1]]
    return jnp.einsum("bhij,bjhd->bihd", weights.astype(v.dtype), v)


def bidirectional_attention(
    q: Float[Array, "b n h d"],
    k: Float[Array, "b n k d"],
    v: Float[Array, "b n k d"],
    lens: Int[Array, " b"],
    *,
    scale: float,
    distance_bias: Float[Array, "h r"] | None = None,
) -> Float[Array, "b n h d"]:
    """Attention of an encoder: every token attends to the whole text.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        lens: int32, tokens of each text; what is behind them is padding, and not attended to.
        scale: Factor of the scores.
        distance_bias: With 2N - 1 columns; added to the score of query i and key j:
            distance_bias[head, i - j + N - 1].

    Returns:
        The attention of every token, arbitrary in padding.
    """
    bias = None
    if distance_bias is not None:
        n = q.shape[1]
        distance = jnp.arange(n)[:, None] - jnp.arange(n)
        bias = distance_bias[None, :, distance + n - 1]
    return jax.nn.dot_product_attention(q, k, v, bias, scale=scale, key_value_seq_lengths=lens)
