"""A paged batch of whole texts, for a forward pass outside of an engine: one that is differentiated, say."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jax_paged.models.attention import AttentionMetadata, Backend, num_parts
from jax_paged.models.causal_lm import CausalLM
from jax_paged.models.kv_place import Place


class PagedInputs(NamedTuple):
    """The arguments of `model.paged`.

    Args:
        tokens: int32 [T], the texts one after the other.
        kv_cache: A pool of zeros for each layer.
        metadata: Where the token rows stand.
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
    """Lays texts out in pages, as an engine's mixed step does.

    `hidden, _ = model.paged(*paged_inputs(model, texts))` has a row per token. Under jit, batches of equal
    lengths share a trace. Gradients need the backend "reference".

    Args:
        model: What will compute them.
        token_lists: At least one text, each of at least one token.
        block_size: Tokens per block.
        backend: Which kernels attend.

    Raises:
        ValueError: If a text is empty, or longer than the model's maximum.
    """
    lens, limit = [len(text) for text in token_lists], model.config.max_position_embeddings
    if not lens or min(lens) < 1 or max(lens) > limit:
        raise ValueError(f"token_lists holds texts of {lens} tokens; allowed: texts of 1 to {limit} tokens")
    width = -(-max(lens) // block_size)
    tables = 1 + np.arange(len(lens) * width).reshape(len(lens), width)  # block 0 is the null block
    positions = np.concatenate([np.arange(n) for n in lens])
    owner = np.repeat(np.arange(len(lens)), lens)
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    specs = model.kv_cache_specs()
    metadata = AttentionMetadata(
        positions=jnp.asarray(positions, jnp.int32),
        slot_mapping=jnp.asarray([slots], jnp.int32),
        block_tables=jnp.asarray([tables], jnp.int32),
        context_lens=jnp.asarray([lens], jnp.int32),
        query_start_loc=jnp.asarray(np.cumsum([0, *lens]), jnp.int32),
        is_decode=False,
        backend=backend,
        places=tuple(Place(layer, 0) for layer in range(len(specs))),
    )
    dtype = jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype
    shapes = [(1 + tables.size, num_parts(s), s.num_kv_heads, block_size, s.head_dim) for s in specs]
    tokens = jnp.asarray(np.concatenate(token_lists), jnp.int32)
    return PagedInputs(tokens, [jnp.zeros(shape, dtype) for shape in shapes], metadata)
