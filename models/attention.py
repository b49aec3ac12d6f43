"""Cache specs of layers, attention metadata of a batch, and attention without a KV cache.

A padded batch of T token rows holds the tokens of B sequences, one sequence after the other. Here T = 8,
B = 4, and one sequence is unused:

    token row        0   1 | 2   3   4 | 5 | 6   7
    sequence         a   a | b   b   b | c | -   -
    query_start_loc  0       2           5   6   6     (B + 1 entries; an unused sequence is empty)
    context_lens     9       3           41  0         (tokens attended to, including this step's)

Other letters in shapes: H query heads, K kv heads, D head size, P blocks in the pool, S tokens per block, M
blocks in a block table, G cache groups. N is 2 in a pool of keys and values, and 1 in a pool of latents.
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jax_paged.models.kv_location import KVLocation
from jax_paged.models.parallel.sharding import TENSOR, DeviceGrid
from jax_paged.pallas_kernels import ops

Backend = ops.Implementation
# Sharding among tensor-parallel devices: pool arrays [P, N, K, S, D] by kv head, and [T, H, D] by head.
POOL_SPEC, HEADS_SPEC = PartitionSpec(None, None, TENSOR), PartitionSpec(None, TENSOR)


class CustomAttention(Protocol):
    """Custom attention function, used in place of the attention backends.

    It is traced into the jitted step, so it must be a pure function of arrays.
    """

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
        """Returns the attention output of every token row.

        The arguments have the meaning that they have in `pallas_kernels.ops.ragged_attention`. This step's
        keys and values are already in the pool. The output of padding rows may be any finite value. If the
        model is divided among devices, each device calls the function with its own heads.

        The pages of a quantized KV cache are converted to floats by `rows_of` and `dequantize` of
        pallas_kernels/quantization.py. For a layer with a LatentAttentionSpec, `kv_pages` is [P, 1, 1, S, D],
        and there is one more keyword argument, `value_dim`.

        Args:
            q: float [T, H, D], queries.
            kv_pages: [P, 2, K, S, D], the layer's keys and values, in the dtype of the KV cache.
            block_tables: int32 [B, M], block ids of each sequence.
            context_lens: int32 [B], tokens of each sequence, including this step's.
            query_start_loc: int32 [B + 1], first token row of each sequence.
            scale: Factor of the scores.
            window: Number of tokens attended to, including the token itself; None for all.
            soft_cap: Scores become soft_cap * tanh(score / soft_cap); None for no cap.
            sinks: float [H], one logit per head that is added to the denominator of the softmax.
            distance_bias: float [H, n], added to the score of query position i and key position j:
                distance_bias[head, min(i - j, n - 1)].

        Returns:
            float [T, H, D].
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
    meta_fields=["is_decode", "backend", "kv_locations", "is_row_by_row", "attend", "grid"],
)
@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """Positions, slots and block tables of a padded batch.

    Layers that cache the same tokens share block tables. These layers form a cache group; there are G groups.

    Args:
        positions: int32 [T], position of each token in its sequence; 0 in padding.
        slot_mapping: int32 [G, T], slot of each token's key and value: block_id * block_size + offset.
            Padding has slots of num_blocks * block_size or more, which are not written.
        block_tables: int32 [G, B, M], block ids of each sequence. Unused entries, and blocks that have left a
            sliding window, are the null block 0.
        context_lens: int32 [G, B], tokens of each sequence, including this step's; 0 for unused sequences. In
            a cache group of cross attention, the number of encoder tokens.
        query_start_loc: int32 [B + 1], first token row of each sequence.
        is_decode: Static. True if T == B and token row b is the only one of sequence b.
        backend: Static. The implementation of the attention kernels.
        kv_locations: Static. Location of each layer's cache, in the order of the model's kv_cache_specs().
        is_row_by_row: Static. Whether every token row attends as if it were a decode step of its own. Its
            result then depends neither on the other rows of the batch nor on how the prompt was divided into
            chunks.
        attend: Static. Custom attention function; None if `backend` computes the attention.
        grid: Static. The devices that the heads are divided among; None for a single device.
        shared_blocks: int32 [B], number of leading blocks that sequences with one token row attend to
            together (cascade attention); see `ops.paged_decode`. Not used in groups with a window. None if
            sequences never share blocks in this way.
        state_slots: int32 [3, B], for each sequence: the slot of its recurrent states; the slot to which this
            step copies these states for the prefix cache (the state checkpoint); and the number of this
            step's tokens that the copy includes. Slots out of range are not written. None if no layer has a
            recurrent state.
        mrope_positions: int32 [3, T], rotary positions along three axes; None if all three are `positions`.
    """

    positions: Int[Array, " t"]
    slot_mapping: Int[Array, "g t"]
    block_tables: Int[Array, "g b m"]
    context_lens: Int[Array, "g b"]
    query_start_loc: Int[Array, " b1"]
    is_decode: bool
    backend: Backend
    kv_locations: tuple[KVLocation, ...]
    is_row_by_row: bool = False
    attend: CustomAttention | None = None
    grid: DeviceGrid | None = None
    shared_blocks: Int[Array, " b"] | None = None
    state_slots: Int[Array, "3 b"] | None = None
    mrope_positions: Int[Array, "3 t"] | None = None

    def per_token_row(self, group: int, *, is_causal: bool) -> tuple[Int[Array, "t m"], Int[Array, " t"]]:
        """Returns the block table and the context length of each token row.

        Args:
            group: Index of the cache group.
            is_causal: Whether a row attends only to tokens up to its own position. If not, every row attends
                to the whole context.

        Returns:
            int32 [T, M], block tables, and int32 [T], numbers of tokens attended to; 0 in padding.
        """
        tables, lens = self.block_tables[group], self.context_lens[group]
        if self.is_decode:
            return tables, lens
        rows = jnp.arange(self.positions.shape[0])
        seq = jnp.sum(rows[:, None] >= self.query_start_loc[1:], axis=1)
        is_padding = seq >= lens.shape[0]
        seq = jnp.minimum(seq, lens.shape[0] - 1)
        num_later = self.query_start_loc[seq + 1] - 1 - rows if is_causal else 0
        return tables[seq], jnp.where(is_padding, 0, lens[seq] - num_later)


@dataclasses.dataclass(frozen=True)
class FullAttentionSpec:
    """Layer that caches the keys and values of all tokens of a sequence.

    Args:
        num_kv_heads: Number of key and value heads.
        head_dim: Size of a head.
    """

    num_kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class SlidingWindowSpec:
    """Layer with sliding window attention. Blocks that have left the window are freed.

    Args:
        num_kv_heads: Number of key and value heads.
        head_dim: Size of a head.
        window: Number of tokens that a token attends to, including itself.
    """

    num_kv_heads: int
    head_dim: int
    window: int


@dataclasses.dataclass(frozen=True)
class CrossAttentionSpec:
    """Layer that attends to the encoder's output.

    Its keys and values are written once per request. After that they are only read.

    Args:
        num_kv_heads: Number of key and value heads.
        head_dim: Size of a head.
    """

    num_kv_heads: int
    head_dim: int


class StateArray(NamedTuple):
    """Shape and dtype of a recurrent state of a layer, for one sequence.

    Args:
        shape: Has at least two dimensions. Tensor-parallel devices divide the second one.
        dtype: Name of the dtype; None for the dtype of the model.
    """

    shape: tuple[int, ...]
    dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """Layer that keeps recurrent states: arrays of a fixed shape per sequence (see recurrent/recurrence.py).

    Args:
        arrays: The recurrent states of the layer.
    """

    arrays: tuple[StateArray, ...]


@dataclasses.dataclass(frozen=True)
class LatentAttentionSpec:
    """Layer with multi-head latent attention (MLA), which caches one vector per token.

    All query heads attend to this vector. The whole vector is the key, and its first `value_dim` elements are
    the value. If devices divide the heads, each device caches the whole vector.

    Args:
        head_dim: Size of the vector.
        value_dim: Size of the value.

    Source: DeepSeek-AI, DeepSeek-V2, 2024.
    """

    head_dim: int
    value_dim: int
    num_kv_heads: ClassVar[int] = 1


AttentionSpec = FullAttentionSpec | SlidingWindowSpec | CrossAttentionSpec | LatentAttentionSpec
KVCacheSpec = AttentionSpec | StateSpec


def window_of(spec: KVCacheSpec) -> int | None:
    """Returns the sliding window of a layer (tokens); None if the layer has no window."""
    return spec.window if isinstance(spec, SlidingWindowSpec) else None


def value_dim_of(spec: KVCacheSpec) -> int | None:
    """Returns the number of leading elements of a key that are its value; None if keys are not latents."""
    return spec.value_dim if isinstance(spec, LatentAttentionSpec) else None


def vectors_per_head(spec: KVCacheSpec) -> int:
    """Returns the size N of a pool's second dimension: 2 for keys and values, 1 for latents."""
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
    """Returns the causal attention of a dense batch, without a KV cache.

    It is used to train models and to check the paged path.

    Args:
        q: float [B, T, H, D], queries.
        k: float [B, T, K, D], keys.
        v: float [B, T, K, D], values.
        scale: Factor of the scores.
        window: Number of tokens that a token attends to, including itself; None for all.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap); None for no cap.
        sinks: float [H], one logit per head that is added to the denominator of the softmax. There is no
            value vector for it. None for no sinks.
        distance_bias: float [H, n], added to the score of query position i and key position j:
            distance_bias[head, min(i - j, n - 1)]. None for no bias. Cannot be combined with `soft_cap` or
            `sinks`.

    Returns:
        float [B, T, H, D].
    """
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    live = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    bias = None
    if distance_bias is not None:
        bias = distance_bias[None, :, jnp.clip(distance, 0, distance_bias.shape[1] - 1)].astype(q.dtype)
    if soft_cap is None and sinks is None:
        return jax.nn.dot_product_attention(q, k, v, bias, live[None, None], scale=scale)
    assert bias is None, "distance_bias can't be combined with soft_cap or sinks"
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
    """Returns the attention of an encoder, in which every token attends to the whole sequence.

    Args:
        q: float [B, N, H, D], queries.
        k: float [B, N, K, D], keys.
        v: float [B, N, K, D], values.
        lens: int32 [B], tokens of each sequence. Later tokens are padding and are not attended to.
        scale: Factor of the scores.
        distance_bias: float [H, 2N - 1], added to the score of query position i and key position j:
            distance_bias[head, i - j + N - 1]. None for no bias.

    Returns:
        float [B, N, H, D]; arbitrary in padding.
    """
    bias = None
    if distance_bias is not None:
        n = q.shape[1]
        distance = jnp.arange(n)[:, None] - jnp.arange(n)
        bias = distance_bias[None, :, distance + n - 1]
    return jax.nn.dot_product_attention(q, k, v, bias, scale=scale, key_value_seq_lengths=lens)
