"""Recurrent states of layers: reading, advancing and writing them in a step.

A layer with a StateSpec keeps arrays of a fixed size per sequence. The pool has one array per state,
[slots, ...], and every sequence has a slot. A layer calls `context.recur` with a Rule, which advances the
states of all sequences of the step at once. A sequence has one token in the step (decode) or several
(prefill). The step may also write a checkpoint: a copy of the state after some of these tokens, which the
prefix cache keeps.

Example: sequence a (slot 1) has one token; sequence b (slot 2) has five tokens and a checkpoint after the
third one, in slot 3:

    slot      0    1        2        3
    before    -    a        b        arbitrary
    after     -    a + 1    b + 5    b + 3

A sequence at position 0 starts from zeros, whatever its slot contains. Unused entries of the batch write
nothing.
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
    data_fields=["sequence", "offset", "start", "checkpoint_len"],
    meta_fields=["is_decode"],
)
@dataclasses.dataclass(frozen=True)
class StepTokens:
    """Assignment of a step's tokens to its B sequences.

    Args:
        sequence: int32 [T], index of each token's sequence; B in padding.
        offset: int32 [T], number of tokens of the same sequence that precede the token in this step.
        start: int32 [B + 1], index of each sequence's first token. An unused sequence has no tokens.
        checkpoint_len: int32 [B], number of the sequence's tokens that the state checkpoint includes.
        is_decode: Static. True if token b is the only one of sequence b.
    """

    sequence: Int[Array, " t"]
    offset: Int[Array, " t"]
    start: Int[Array, " b1"]
    checkpoint_len: Int[Array, " b"]
    is_decode: bool


class Rule(Protocol):
    """Recurrence that advances the states of all sequences and returns the outputs of their tokens.

    A rule is a pytree. If devices share a model, each device advances its own part of the state. The inputs,
    the arrays of the rule and the state of a sequence are all divided along their second dimension, which
    counts channels or heads.
    """

    def __call__(
        self, step: StepTokens, state: Float[Array, "b ..."], *inputs: Float[Array, "t ..."]
    ) -> tuple[Float[Array, "t ..."], Float[Array, "b ..."], Float[Array, "b ..."]]:
        """Advances the states by the tokens of the step.

        Args:
            step: Assignment of tokens to sequences.
            state: [B, ...], state of each sequence before the step.
            *inputs: [T, ...] each, inputs of the rule for each token.

        Returns:
            [T, ...], the outputs of the tokens, finite in padding; [B, ...], the states after all tokens; and
            [B, ...], the states after the first `checkpoint_len` tokens.
        """
        ...


def recur_paged(
    rule: Rule, index: int, inputs: tuple[Array, ...], kv_cache: list[Array], metadata: AttentionMetadata
) -> Array:
    """Advances a recurrent state of every sequence of a paged batch.

    Args:
        rule: Defines how the state changes.
        index: Index of the state's array in `kv_cache`. This list entry is replaced by the written array.
        inputs: [T, ...] each, the inputs of the rule.
        kv_cache: The pool arrays. The array of a state is [slots, ...].
        metadata: Positions, slots and token rows of the sequences.

    Returns:
        [T, ...], the outputs of the tokens.
    """

    def recur(
        rule: Rule, states: Array, inputs: tuple[Array, ...], metadata: AttentionMetadata
    ) -> tuple[Array, Array]:
        assert metadata.state_slots is not None, "the metadata has no state_slots"
        (slots, checkpoint_slots, checkpoint_len), start = metadata.state_slots, metadata.query_start_loc
        tokens = jnp.arange(metadata.positions.shape[0])
        sequence = tokens if metadata.is_decode else jnp.sum(tokens[:, None] >= start[1:], axis=1)
        step = StepTokens(sequence, tokens - start[sequence], start, checkpoint_len, metadata.is_decode)
        is_new = metadata.positions.at[start[:-1]].get(mode="clip") == 0
        state = states.at[slots].get(mode="fill", fill_value=0)
        state = jnp.where(is_new.reshape(-1, *[1] * (state.ndim - 1)), 0, state)
        out, state, checkpoint = rule(step, state, *inputs)
        states = states.at[slots].set(state.astype(states.dtype), mode="drop")
        return states.at[checkpoint_slots].set(checkpoint.astype(states.dtype), mode="drop"), out

    if metadata.grid is not None:
        specs = HEADS_SPEC, POOL_SPEC, HEADS_SPEC, PartitionSpec()
        recur = metadata.grid.shard_map(recur, specs, (POOL_SPEC, HEADS_SPEC))
    kv_cache[index], out = recur(rule, kv_cache[index], inputs, metadata)
    return out


def recur_dense(
    specs: list[KVCacheSpec], shape: tuple[int, ...], rule: Rule, layer: int, index: int, *inputs: Array
) -> Array:
    """Advances a recurrent state along whole sequences of equal length, starting from zeros.

    Args:
        specs: The model's kv_cache_specs().
        shape: [..., T], the shape of the token ids, which are the leading dimensions of the inputs.
        rule: Defines how the state changes.
        layer: Index of a StateSpec in `specs`.
        index: Index of the state in StateSpec.arrays.
        *inputs: [..., T, ...] each, the inputs of the rule.

    Returns:
        [..., T, ...], the outputs of the tokens.
    """
    spec = specs[layer]
    assert isinstance(spec, StateSpec), f"layer {layer} has no recurrent states"
    array, (*_, length) = spec.arrays[index], shape
    num_seqs, num_tokens = math.prod(shape[:-1]), math.prod(shape)
    tokens, start = jnp.arange(num_tokens), jnp.arange(num_seqs + 1) * length
    step = StepTokens(
        tokens // length, tokens % length, start, jnp.zeros(num_seqs, jnp.int32), is_decode=False
    )
    flat = [x.reshape(num_tokens, *x.shape[len(shape) :]) for x in inputs]
    state = jnp.zeros((num_seqs, *array.shape), array.dtype or inputs[0].dtype)
    out, _, _ = rule(step, state, *flat)
    return out.reshape(*shape, *out.shape[1:])


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kernel"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Convolution:
    """Causal convolution over time, separately for each channel.

    The state is [B, K - 1, C], the last K - 1 inputs of each sequence.

    Args:
        kernel: float [K, C], weights of the K latest inputs; the latest input is last.
    """

    kernel: Float[Array, "k c"]

    def __call__(self, step: StepTokens, state: Array, *inputs: Array) -> tuple[Array, Array, Array]:
        """Returns the convolution at every token, and the last K - 1 inputs as states; see Rule.

        Args:
            step: Assignment of tokens to sequences.
            state: [B, K - 1, C], the inputs before the step.
            *inputs: One array, float [T, C].

        Returns:
            [T, C] in the dtype of the input; [B, K - 1, C], the states after all tokens; and [B, K - 1, C],
            the states after the first `checkpoint_len` tokens.
        """
        (x,), num_before = inputs, len(self.kernel) - 1
        kernel = self.kernel.astype(jnp.float32)
        if step.is_decode:
            window = jnp.concatenate([state, x[:, None].astype(state.dtype)], axis=1)
            out = jnp.einsum("bkc,kc->bc", window.astype(jnp.float32), kernel)
            return out.astype(x.dtype), window[:, 1:], window[:, 1:]
        out = x.astype(jnp.float32) * kernel[-1]
        for back in range(1, num_before + 1):
            earlier = jnp.pad(x, ((back, 0), (0, 0)))[: len(x)]
            index = jnp.clip(num_before + step.offset - back, 0, num_before - 1)
            before = state.at[step.sequence, index].get(mode="fill", fill_value=0)
            earlier = jnp.where((step.offset >= back)[:, None], earlier, before)
            out += earlier.astype(jnp.float32) * kernel[-1 - back]
        lens = step.start[1:] - step.start[:-1]
        final, checkpoint = (self._state(step, state, x, n) for n in (lens, step.checkpoint_len))
        return out.astype(x.dtype), final, checkpoint

    @staticmethod
    def _state(step: StepTokens, state: Array, x: Array, num_tokens: Array) -> Array:
        """Returns the last K - 1 inputs of each sequence after its first `num_tokens` tokens of this step."""
        # Indices in the concatenation of the sequence's old state and its tokens.
        i = num_tokens[:, None] + jnp.arange(state.shape[1])
        old = jnp.take_along_axis(state, jnp.clip(i, 0, state.shape[1] - 1)[..., None], axis=1)
        offset = i - state.shape[1]
        new = x.at[step.start[:-1, None] + jnp.maximum(offset, 0)].get(mode="clip")
        return jnp.where((offset >= 0)[..., None], new.astype(state.dtype), old)


class Recur(Protocol):
    """Function that advances the recurrent states of a layer in a forward pass."""

    def __call__(self, rule: Rule, layer: int, index: int, *inputs: Any) -> Array:
        """Advances a recurrent state of a layer and returns the outputs of the tokens.

        Args:
            rule: Defines how the state changes.
            layer: Index of a StateSpec in the model's kv_cache_specs().
            index: Index of the state in StateSpec.arrays.
            *inputs: [*T, ...] each, the inputs of the rule.

        Returns:
            [*T, ...].
        """
        ...


def no_recurrence(rule: Rule, layer: int, index: int, *inputs: Any) -> Array:
    """Raises an AssertionError: the default of `recur` in passes without recurrent states."""
    raise AssertionError(f"layer {layer} called recur in a forward pass without recurrent states")
