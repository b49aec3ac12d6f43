"""Paged inputs for a forward pass outside the engine, for example one that is differentiated."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jax_paged.arguments.shown_values import shown
from jax_paged.models.attention import AttentionMetadata, Backend, StateSpec, vectors_per_head
from jax_paged.models.causal_lm import CausalLM
from jax_paged.models.kv_location import KVLocation


class PagedInputs(NamedTuple):
    """The arguments of `model.paged`.

    Args:
        tokens: int32 [T], the tokens of all sequences, one sequence after the other.
        kv_cache: The pool arrays, filled with zeros: [P, N, K, S, D] for keys and values, [B, ...] for
            recurrent states.
        metadata: Positions of the token rows, block tables, and the pool array of each layer.
    """

    tokens: Int[Array, " t"]
    kv_cache: list[Array]
    metadata: AttentionMetadata


def paged_inputs(
    model: CausalLM,
    token_lists: Sequence[Sequence[int]],
    *,
    block_size: int = 16,
    backend: Backend = "reference",
) -> PagedInputs:
    """Returns the inputs of a step that computes all tokens of some sequences at once.

    `hidden, _ = model.paged(*paged_inputs(model, token_lists))` returns one row per token. Under jit, batches
    whose sequences have the same lengths share a trace. Gradients require the backend "reference".

    Args:
        model: The model that the inputs are for.
        token_lists: Token ids of at least one sequence, each of at least one token.
        block_size: Tokens per block.
        backend: The implementation of the attention kernels.

    Raises:
        ValueError: If a sequence is empty or longer than the model's maximum.
    """
    lens, limit = [len(tokens) for tokens in token_lists], model.config.max_position_embeddings
    if not lens or min(lens) < 1 or max(lens) > limit:
        raise ValueError(f"the lengths of `token_lists` must be in [1, {limit}], got {shown(lens)}")
    width = -(-max(lens) // block_size)
    tables = 1 + np.arange(len(lens) * width).reshape(len(lens), width)  # block 0 is the null block
    positions = np.concatenate([np.arange(n) for n in lens])
    owner = np.repeat(np.arange(len(lens)), lens)
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    specs = model.kv_cache_specs()
    sizes = [len(spec.arrays) if isinstance(spec, StateSpec) else 1 for spec in specs]
    indices, row = np.cumsum([0, *sizes[:-1]]).tolist(), jnp.arange(len(lens))
    metadata = AttentionMetadata(
        positions=jnp.asarray(positions, jnp.int32),
        slot_mapping=jnp.asarray([slots], jnp.int32),
        block_tables=jnp.asarray([tables], jnp.int32),
        context_lens=jnp.asarray([lens], jnp.int32),
        query_start_loc=jnp.asarray(np.cumsum([0, *lens]), jnp.int32),
        is_decode=False,
        backend=backend,
        kv_locations=tuple(KVLocation(index, 0) for index in indices),
        state_slots=jnp.stack([row, jnp.full_like(row, len(lens)), jnp.zeros_like(row)]),
    )
    dtype = jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype
    kv_cache: list[Array] = []
    for spec in specs:
        if isinstance(spec, StateSpec):
            kv_cache += [jnp.zeros((len(lens), *a.shape), a.dtype or dtype) for a in spec.arrays]
        else:
            shape = (1 + tables.size, vectors_per_head(spec), spec.num_kv_heads, block_size, spec.head_dim)
            kv_cache.append(jnp.zeros(shape, dtype))
    return PagedInputs(jnp.asarray(np.concatenate(token_lists), jnp.int32), kv_cache, metadata)
