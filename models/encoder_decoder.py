"""Base class of encoder-decoder models.

`write_encoded` runs the encoder once per request and writes the keys and values of cross attention to the KV
cache. The inherited method `paged` then runs the decoder. A dense call runs both, without a KV cache.
"""

import abc
import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import Backend, CrossAttentionSpec, bidirectional_attention, dense_attention
from jax_paged.models.causal_lm import LanguageModel, dense_positions
from jax_paged.models.forward_context import ForwardContext
from jax_paged.models.kv_location import KVLocation
from jax_paged.models.paged_attention import write_kv
from jax_paged.models.parallel.sharding import DeviceGrid


class EncoderDecoderLM(LanguageModel):
    """Base class of encoder-decoder models.

    A family adds its modules and implements the abstract methods. Each decoder layer has two entries in
    `kv_cache_specs()`: one for self-attention and one for cross attention. The indices of these entries are
    the layer indices for `context.attend` and `context.cross_attend`.
    """

    @abc.abstractmethod
    def encode(self, tokens: Int[Array, "b n"], context: ForwardContext) -> Float[Array, "b n e"]:
        """Returns the encoder's output.

        Args:
            tokens: int32 [B, N], token ids.
            context: The context that `encoder_context` returns. It excludes padding from attention.

        Returns:
            float [B, N, E]; arbitrary in padding.
        """

    @abc.abstractmethod
    def cross_kv(self, encoded: Float[Array, "b n e"], context: ForwardContext) -> list[tuple[Array, Array]]:
        """Returns the cross-attention keys and values of an encoder output, one pair per CrossAttentionSpec.

        Args:
            encoded: float [B, N, E], the encoder's output.
            context: The context that was passed to `encode`, because the rows of `encoded` are
                the encoder's token rows.

        Returns:
            Pairs of keys and values, float [B, N, K, D] each.
        """

    def __call__(
        self, encoder_tokens: Int[Array, "b n"], encoder_lens: Int[Array, " b"], tokens: Int[Array, "b t"]
    ) -> Float[Array, "b t v"]:
        """Returns the logits of a dense batch, without a KV cache.

        Args:
            encoder_tokens: int32 [B, N], token ids of the encoder's sequences, padded.
            encoder_lens: int32 [B], tokens of each encoder sequence.
            tokens: int32 [B, T], token ids of the decoder's sequences.

        Returns:
            float32 [B, T, V].
        """
        context = self.encoder_context(encoder_tokens, encoder_lens)
        cross = self.cross_kv(self.encode(encoder_tokens, context), context)
        return self.logits(self.hidden(tokens, self.dense_context(tokens, cross, encoder_lens)))

    def encoder_context(self, tokens: Int[Array, "b n"], lens: Int[Array, " b"]) -> ForwardContext:
        """Returns the context of a forward pass of the encoder.

        Args:
            tokens: int32 [B, N], token ids; entries from `lens` on are padding.
            lens: int32 [B], tokens of each sequence.
        """

        def attend(layer: int, q: Array, k: Any, v: Any, **options: Any) -> Array:
            return bidirectional_attention(q, k, v, lens, **options)

        return ForwardContext(self, dense_positions(tokens), attend)

    def dense_context(
        self, tokens: Int[Array, "b t"], cross: list[tuple[Array, Array]], encoder_lens: Int[Array, " b"]
    ) -> ForwardContext:
        """Returns the context of a forward pass of the decoder over a dense batch.

        Args:
            tokens: int32 [B, T], token ids. All sequences start at position 0.
            cross: Keys and values that `cross_kv` returns, float [B, N, K, D] each.
            encoder_lens: int32 [B], tokens of each encoder sequence.
        """
        by_layer = dict(zip(self._cross_layers(), cross, strict=True))

        def attend(layer: int, q: Array, k: Any, v: Any, **options: Any) -> Array:
            return dense_attention(q, k, v, **options)

        def cross_attend(layer: int, q: Array, *, scale: float) -> Array:
            k, v = by_layer[layer]
            return jax.nn.dot_product_attention(q, k, v, scale=scale, key_value_seq_lengths=encoder_lens)

        return ForwardContext(self, dense_positions(tokens), attend, cross_attend)

    def write_encoded(
        self,
        tokens: Int[Array, " n"],
        length: Int[Array, ""],
        kv_cache: list[Array],
        slot_mapping: Int[Array, "g n"],
        *,
        kv_locations: tuple[KVLocation, ...],
        backend: Backend,
        grid: DeviceGrid | None = None,
    ) -> list[Array]:
        """Runs the encoder on one sequence and writes the cross-attention keys and values to the pool.

        Args:
            tokens: int32 [N], token ids, padded.
            length: int32 [], number of tokens without padding.
            kv_cache: The pool arrays, [P, 2, K, S, D] each. The list itself is not modified.
            slot_mapping: int32 [G, N], slot of each token in each cache group; out of range in padding.
            kv_locations: Location of each layer's cache, in the order of kv_cache_specs().
            backend: The implementation that writes.
            grid: The devices that the model is divided among; None for a single device.

        Returns:
            The list of pool arrays, with the written arrays of cross attention.
        """
        kv_cache = list(kv_cache)
        context = dataclasses.replace(self.encoder_context(tokens[None], length[None]), grid=grid)
        cross = self.cross_kv(self.encode(tokens[None], context), context)
        for layer, (k, v) in zip(self._cross_layers(), cross, strict=True):
            pool, group, _ = kv_locations[layer]
            written = k[0], v[0], slot_mapping[group]
            kv_cache[pool] = write_kv(kv_cache[pool], *written, backend=backend, grid=grid)
        return kv_cache

    def _cross_layers(self) -> list[int]:
        return [i for i, s in enumerate(self.kv_cache_specs()) if isinstance(s, CrossAttentionSpec)]
