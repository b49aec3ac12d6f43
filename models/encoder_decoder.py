"""What encoder-decoder families share: the dense call, and the paged one after an encoder."""

import abc
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import (
    AttentionMetadata,
    Backend,
    CrossAttentionSpec,
    cross_attention,
    dense_attention,
    paged_attention,
)
from jax_paged.models.causal_lm import Attend, LanguageModel
from jax_paged.pallas_kernels import ops


class CrossAttend(Protocol):
    """How a layer attends to the encoder's output: (layer, q) to the attention of every token."""

    def __call__(self, layer: int, q: Array, *, scale: float) -> Array: ...


class EncoderDecoderLM(LanguageModel):
    """An encoder and a decoder; a family adds its modules and the methods that are abstract.

    A layer's number is its place in kv_cache_specs(), where self and cross attention have an entry each.
    """

    @abc.abstractmethod
    def encode(self, tokens: Int[Array, "b n"], lens: Int[Array, " b"]) -> Float[Array, "b n e"]:
        """Returns the encoder's output; what lies past lens is padding, and never matters."""

    @abc.abstractmethod
    def cross_kv(self, encoded: Float[Array, "*n e"]) -> list[tuple[Array, Array]]:
        """Returns keys and values [*n, K, D] of an encoder's output, one pair a CrossAttentionSpec."""

    @abc.abstractmethod
    def hidden(
        self,
        tokens: Int[Array, "*t"],
        positions: Int[Array, "*t"],
        attend: Attend,
        cross_attend: CrossAttend,
    ) -> Float[Array, "*t e"]:
        """Returns the decoder's last hidden state of every token."""

    def __call__(
        self, encoder_tokens: Int[Array, "b n"], encoder_lens: Int[Array, " b"], tokens: Int[Array, "b t"]
    ) -> Float[Array, "b t v"]:
        """Returns the float32 logits of a dense batch, without any cache."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        cross = self.cross_kv(self.encode(encoder_tokens, encoder_lens))
        by_layer = dict(zip(self._cross_layers(), cross, strict=True))

        def attend(layer: int, q: Array, k: Array, v: Array, **options: Any) -> Array:
            return dense_attention(q, k, v, **options)

        def cross_attend(layer: int, q: Array, *, scale: float) -> Array:
            k, v = by_layer[layer]
            return jax.nn.dot_product_attention(q, k, v, scale=scale, key_value_seq_lengths=encoder_lens)

        return self.logits(self.hidden(tokens, positions, attend, cross_attend))

    def paged(
        self, tokens: Int[Array, " t"], kv_cache: list[Array], metadata: AttentionMetadata
    ) -> tuple[Float[Array, "t e"], list[Array]]:
        kv_cache, specs = list(kv_cache), self.kv_cache_specs()

        def attend(layer: int, q: Array, k: Array, v: Array, **options: Any) -> Array:
            return paged_attention(layer, specs[layer], q, k, v, kv_cache, metadata, **options)

        def cross_attend(layer: int, q: Array, *, scale: float) -> Array:
            return cross_attention(layer, q, kv_cache, metadata, scale=scale)

        return self.hidden(tokens, metadata.positions, attend, cross_attend), kv_cache

    def write_encoded(
        self,
        tokens: Int[Array, " n"],
        length: Int[Array, ""],
        kv_cache: list[Array],
        slot_mapping: Int[Array, "g n"],
        *,
        places: tuple[tuple[int, int], ...],
        backend: Backend,
    ) -> list[Array]:
        """Runs the encoder on one text and writes what the decoder attends to into the pools.

        Args:
            tokens: int32 [N], padded.
            length: Tokens of the text.
            kv_cache: The pools.
            slot_mapping: int32 [G, N], where each token goes; out of range in padding.
            places: (pool, group) of each layer.
            backend: Which kernels write.
        """
        kv_cache = list(kv_cache)
        cross = self.cross_kv(self.encode(tokens[None], length[None])[0])
        for layer, (k, v) in zip(self._cross_layers(), cross, strict=True):
            pool, group = places[layer]
            kv_cache[pool] = ops.write_kv(kv_cache[pool], k, v, slot_mapping[group], backend=backend)
        return kv_cache

    def _cross_layers(self) -> list[int]:
        return [i for i, s in enumerate(self.kv_cache_specs()) if isinstance(s, CrossAttentionSpec)]
