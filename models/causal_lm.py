"""What all decoder families share: the dense call that trains, and the paged one that serves."""

import abc
from typing import Any, ClassVar, Protocol

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import (
    AttentionMetadata,
    KVCacheSpec,
    dense_attention,
    paged_attention,
    window_of,
)
from jax_paged.models.hf_format import WeightTable


class Attend(Protocol):
    """How a layer's tokens attend: (layer, q, k, v) to the attention of every token.

    Options are those of dense_attention; the window comes from the layer's KVCacheSpec.
    """

    def __call__(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        *,
        scale: float,
        soft_cap: float | None = None,
        distance_bias: Array | None = None,
    ) -> Array: ...


class LanguageModel(nnx.Module):
    """What the engine and the loader ask of every family.

    Args:
        config: Of the family's config_class.
        dtype: Of weights and activations.
        rngs: Where random weights come from.
    """

    config_class: ClassVar[Any]
    weight_table: ClassVar[WeightTable]
    config: Any

    @abc.abstractmethod
    def __init__(self, config: Any, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None: ...

    @abc.abstractmethod
    def paged(
        self, tokens: Int[Array, " t"], kv_cache: list[Array], metadata: AttentionMetadata
    ) -> tuple[Float[Array, "t e"], list[Array]]:
        """Returns the last hidden state of every token row of a paged batch, and the pools written to.

        Args:
            tokens: int32 [T], token ids.
            kv_cache: The pools, [P, 2, K, S, D] each.
            metadata: Where the rows stand, and which pool is each layer's.
        """

    @abc.abstractmethod
    def logits(self, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the float32 logits of hidden states."""

    @abc.abstractmethod
    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Returns what each layer caches."""


class CausalLM(LanguageModel):
    """A decoder; a family adds its modules and the methods that are abstract."""

    @abc.abstractmethod
    def hidden(
        self, tokens: Int[Array, "*t"], positions: Int[Array, "*t"], attend: Attend
    ) -> Float[Array, "*t e"]:
        """Returns the last hidden state of every token; how tokens attend is the caller's."""

    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t v"]:
        """Returns the float32 logits of a dense causal batch, without any cache.

        Raises:
            ValueError: If the texts are longer than the model was made for.
        """
        limit = self.config.max_position_embeddings
        if tokens.shape[1] > limit:
            raise ValueError(f"tokens holds texts of {tokens.shape[1]} tokens; allowed: at most {limit}")
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        specs = self.kv_cache_specs()

        def attend(layer: int, q: Array, k: Array, v: Array, **options: Any) -> Array:
            return dense_attention(q, k, v, window=window_of(specs[layer]), **options)

        return self.logits(self.hidden(tokens, positions, attend))

    def paged(
        self, tokens: Int[Array, " t"], kv_cache: list[Array], metadata: AttentionMetadata
    ) -> tuple[Float[Array, "t e"], list[Array]]:
        kv_cache, specs = list(kv_cache), self.kv_cache_specs()

        def attend(layer: int, q: Array, k: Array, v: Array, **options: Any) -> Array:
            return paged_attention(layer, specs[layer], q, k, v, kv_cache, metadata, **options)

        return self.hidden(tokens, metadata.positions, attend), kv_cache
