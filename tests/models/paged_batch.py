"""A paged batch made by hand: whole texts, each in blocks of its own."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_paged.models.attention import (
    AttentionMetadata,
    CrossAttentionSpec,
    KVCacheSpec,
    StateSpec,
    vectors_per_head,
)
from jax_paged.models.kv_location import KVLocation

BLOCK_SIZE = 16


def paged_batch(
    specs: list[KVCacheSpec], lens: list[int], encoder_lens: list[int] | None = None
) -> tuple[AttentionMetadata, list[Array]]:
    """Returns the metadata of a step that computes whole texts, and pools, one per layer; states are NaN.

    Cache group 0 has the blocks of the texts, cache group 1 those of the encoder's texts.

    Args:
        specs: The model's kv_cache_specs().
        lens: Tokens of each text.
        encoder_lens: Tokens that the encoder has read for each text.
    """
    encoder_lens = [0] * len(lens) if encoder_lens is None else encoder_lens
    width = -(-max(*lens, *encoder_lens) // BLOCK_SIZE)
    tables = 1 + np.arange(len(lens) * width).reshape(len(lens), width)
    positions = np.concatenate([np.arange(n) for n in lens])
    owner = np.repeat(np.arange(len(lens)), lens)
    slots = tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    row, sizes = jnp.arange(len(lens)), [len(s.arrays) if isinstance(s, StateSpec) else 1 for s in specs]
    first = np.cumsum([0, *sizes[:-1]]).tolist()
    metadata = AttentionMetadata(
        positions=jnp.asarray(positions, jnp.int32),
        slot_mapping=jnp.asarray([slots, slots], jnp.int32),
        block_tables=jnp.asarray([tables, tables], jnp.int32),
        context_lens=jnp.asarray([lens, encoder_lens], jnp.int32),
        query_start_loc=jnp.asarray(np.cumsum([0, *lens]), jnp.int32),
        is_decode=False,
        backend="xla",
        kv_locations=tuple(
            KVLocation(i, int(isinstance(s, CrossAttentionSpec))) for i, s in zip(first, specs, strict=True)
        ),
        state_slots=jnp.stack([row + 1, jnp.full_like(row, 1 + len(lens)), jnp.zeros_like(row)]),
    )
    arrays: list[Array] = []
    for spec in specs:
        if isinstance(spec, StateSpec):
            arrays += [jnp.full((1 + len(lens), *array.shape), jnp.nan) for array in spec.arrays]
        else:
            shape = (1 + tables.size, vectors_per_head(spec), spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
            arrays.append(jnp.zeros(shape))
    return metadata, arrays
