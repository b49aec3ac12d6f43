"""States that layers keep per sequence: read from their slots, advanced by a step's tokens, written back.

A layer names a rule: what its state becomes with every token. A step has rows of one token or of several, and
a rule advances all of them at once. With a row of sequence a (1 token) and one of b (5 tokens, a checkpoint
behind the third), of which a has slot 1, b slot 2 and the checkpoint slot 3:

    slot      0    1        2        3           a row at position 0 begins with zeros, not with its slot
    before    -    a        b        anything
    behind    -    a + 1    b + 5    b + 3       rows that are not used write nothing
"""

import dataclasses
import functools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import HEADS_SPEC, POOL_SPEC, AttentionMetadata, KVCacheSpec, StateSpec


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["row", "place", "first", "num_kept"],
    meta_fields=["is_decode"],
)
@dataclasses.dataclass(frozen=True)
class TokenRows:
    """How the tokens of a step are divided among sequences.

    Args:
        row: int32 [T], the row of each token; B in padding.
        place: int32 [T], how many tokens of its row come before it.
        first: int32 [B + 1], first token of each row; a row that is not used is empty.
        num_kept: int32 [B], of how many of its tokens the state is wanted, beside that of all.
        is_decode: Static; whether token b is the only one of row b.
    """

    row: Int[Array, " t"]
    place: Int[Array, " t"]
    first: Int[Array, " b1"]
    num_kept: Int[Array, " b"]
    is_decode: bool


class Rule(Protocol):
    """What becomes of a state with every token, and what the tokens get of it.

    A rule is a pytree. Where devices share a model, each advances its part of a state, of inputs and of the
    rule's own arrays: these are divided along their second dimension, channels or heads.
    """

    def __call__(
        self, rows: TokenRows, state: Float[Array, "b ..."], *inputs: Float[Array, "t ..."]
    ) -> tuple[Float[Array, "t ..."], Float[Array, "b ..."], Float[Array, "b ..."]]:
        """Returns what tokens get (finite in padding), and states behind all and behind num_kept of them."""
        ...


def recur_paged(
    rule: Rule, place: int, inputs: tuple[Array, ...], kv_cache: list[Array], metadata: AttentionMetadata
) -> Array:
    """Advances a state of every row of a paged batch; returns what each token gets.

    Args:
        rule: What advances it.
        place: Of the states' array in kv_cache, which is replaced by the one that was written to.
        inputs: What the rule takes, a row per token.
        kv_cache: The arrays of the pool.
        metadata: Where the tokens stand.
    """

    def recur(
        rule: Rule, states: Array, inputs: tuple[Array, ...], metadata: AttentionMetadata
    ) -> tuple[Array, Array]:
        assert metadata.state_slots is not None, "a layer keeps a state"
        (slots, kept_slots, num_kept), first = metadata.state_slots, metadata.query_start_loc
        tokens = jnp.arange(metadata.positions.shape[0])
        row = tokens if metadata.is_decode else jnp.sum(tokens[:, None] >= first[1:], axis=1)
        rows = TokenRows(row, tokens - first[row], first, num_kept, metadata.is_decode)
        is_new = metadata.positions.at[first[:-1]].get(mode="clip") == 0
        state = states.at[slots].get(mode="fill", fill_value=0)
        state = jnp.where(is_new.reshape(-1, *[1] * (state.ndim - 1)), 0, state)
        out, state, kept = rule(rows, state, *inputs)
        states = states.at[slots].set(state.astype(states.dtype), mode="drop")
        return states.at[kept_slots].set(kept.astype(states.dtype), mode="drop"), out

    if metadata.grid is not None:
        specs = HEADS_SPEC, POOL_SPEC, HEADS_SPEC, PartitionSpec()
        recur = metadata.grid.on_each(recur, specs, (POOL_SPEC, HEADS_SPEC))
    kv_cache[place], out = recur(rule, kv_cache[place], inputs, metadata)
    return out


def recur_dense(
    specs: list[KVCacheSpec], shape: tuple[int, ...], rule: Rule, layer: int, index: int, *inputs: Array
) -> Array:
    """Advances a state along whole texts of one length; returns what each token gets.

    Args:
        specs: The model's kv_cache_specs().
        shape: The leading dimensions of the inputs, those of the tokens, [..., T].
        rule: What advances it.
        layer: Index into the specs.
        index: Of the state among those of the layer.
        *inputs: What the rule takes.
    """
    spec = specs[layer]
    assert isinstance(spec, StateSpec), "the layer keeps a state"
    own, (*_, length) = spec.arrays[index], shape
    num_rows, num_tokens = math.prod(shape[:-1]), math.prod(shape)
    tokens, first = jnp.arange(num_tokens), jnp.arange(num_rows + 1) * length
    rows = TokenRows(
        tokens // length, tokens % length, first, jnp.zeros(num_rows, jnp.int32), is_decode=False
    )
    flat = [x.reshape(num_tokens, *x.shape[len(shape) :]) for x in inputs]
    state = jnp.zeros((num_rows, *own.shape), own.dtype or inputs[0].dtype)
    out, _, _ = rule(rows, state, *flat)
    return out.reshape(*shape, *out.shape[1:])


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kernel"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Convolution:
    """A causal convolution of every channel over time; the state holds the inputs before a row.

    Args:
        kernel: Of the K latest inputs, the latest last.
    """

    kernel: Float[Array, "k c"]

    def __call__(self, rows: TokenRows, state: Array, *inputs: Array) -> tuple[Array, Array, Array]:
        """Returns the convolution of every token, and the last K - 1 inputs, as Rule has them."""
        (x,), num_before = inputs, len(self.kernel) - 1
        kernel = self.kernel.astype(jnp.float32)
        if rows.is_decode:
            window = jnp.concatenate([state, x[:, None].astype(state.dtype)], axis=1)
            out = jnp.einsum("bkc,kc->bc", window.astype(jnp.float32), kernel)
            return out.astype(x.dtype), window[:, 1:], window[:, 1:]
        out = x.astype(jnp.float32) * kernel[-1]
        for back in range(1, num_before + 1):
            earlier = jnp.pad(x, ((back, 0), (0, 0)))[: len(x)]
            index = jnp.clip(num_before + rows.place - back, 0, num_before - 1)
            before = state.at[rows.row, index].get(mode="fill", fill_value=0)
            earlier = jnp.where((rows.place >= back)[:, None], earlier, before)
            out += earlier.astype(jnp.float32) * kernel[-1 - back]
        stop = rows.first[1:] - rows.first[:-1]
        ended, kept = (self._state(rows, state, x, n) for n in (stop, rows.num_kept))
        return out.astype(x.dtype), ended, kept

    @staticmethod
    def _state(rows: TokenRows, state: Array, x: Array, num_tokens: Array) -> Array:
        """Returns the inputs before some token of each row."""
        i = num_tokens[:, None] + jnp.arange(state.shape[1])  # in the row with the state before it
        old = jnp.take_along_axis(state, jnp.clip(i, 0, state.shape[1] - 1)[..., None], axis=1)
        place = i - state.shape[1]
        new = x.at[rows.first[:-1, None] + jnp.maximum(place, 0)].get(mode="clip")
        return jnp.where((place >= 0)[..., None], new.astype(state.dtype), old)


class Recur(Protocol):
    """How the states of a layer are advanced: (rule, layer, index, inputs) to what each token gets."""

    def __call__(self, rule: Rule, layer: int, index: int, *inputs: Any) -> Array: ...


def no_states(rule: Rule, layer: int, index: int, *inputs: Any) -> Array:
    raise AssertionError(f"layer {layer} asks for a state in a pass without any")
