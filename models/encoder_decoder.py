"""What all encoder-decoder families share: the dense call, and the paged one after an encoder."""

import abc
import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import Backend, CrossAttentionSpec, bidirectional_attention, dense_attention
from jax_paged.models.causal_lm import LanguageModel, dense_positions
from jax_paged.models.forward_context import ForwardContext
from jax_paged.models.kv_location import Place
from jax_paged.models.paged_attention import write_kv
from jax_paged.models.parallel.sharding import DeviceGrid


class EncoderDecoderLM(LanguageModel):
    """An encoder and a decoder; a family adds its modules and the abstract methods.

    A layer of the decoder has two entries in kv_cache_specs(), one for its own attention and one for cross
    attention; the indices of these entries are the layers that context.attend and context.cross_attend take.
    """

    @abc.abstractmethod
    def encode(self, tokens: Int[Array, "b n"], context: ForwardContext) -> Float[Array, "b n e"]:
        """Returns the encoder's output.

        Args:
            tokens: int32, token ids.
            context: As encoder_context returns it. Padding is never attended to; its output is arbitrary.
        """

    @abc.abstractmethod
    def cross_kv(self, encoded: Float[Array, "b n e"], context: ForwardContext) -> list[tuple[Array, Array]]:
        """Returns the keys and values [B, N, K, D] of an encoder's output, one pair per CrossAttentionSpec.

        Args:
            encoded: As `encode` returns it.
            context: The one that `encode` took: the rows are the encoder's.
        """

    def __call__(
        self, encoder_tokens: Int[Array, "b n"], encoder_lens: Int[Array, " b"], tokens: Int[Array, "b t"]
    ) -> Float[Array, "b t v"]:
        """Returns the float32 logits of a dense batch, without a cache."""
        context = self.encoder_context(encoder_tokens, encoder_lens)
        cross = self.cross_kv(self.encode(encoder_tokens, context), context)
        return self.logits(self.hidden(tokens, self.dense_context(tokens, cross, encoder_lens)))

    def encoder_context(self, tokens: Int[Array, "b n"], lens: Int[Array, " b"]) -> ForwardContext:
        """Returns the context of a pass of the encoder.

        Args:
            tokens: int32, token ids; padding from lens on.
            lens: int32, tokens of each text.
        """

        def attend(layer: int, q: Array, k: Any, v: Any, **options: Any) -> Array:
            return bidirectional_attention(q, k, v, lens, **options)

        return ForwardContext(self, dense_positions(tokens), attend)

    def dense_context(
        self, tokens: Int[Array, "b t"], cross: list[tuple[Array, Array]], encoder_lens: Int[Array, " b"]
    ) -> ForwardContext:
        """Returns the context of a pass of the decoder over a dense batch.

        Args:
            tokens: int32, token ids; all texts start at position 0.
            cross: As cross_kv returns it.
            encoder_lens: int32, tokens that the encoder read of each text.
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
        places: tuple[Place, ...],
        backend: Backend,
        grid: DeviceGrid | None = None,
    ) -> list[Array]:
        """Runs the encoder on one text and writes the keys and values for cross attention to the pools.

        Args:
            tokens: int32 [N], padded.
            length: Tokens of the text.
            kv_cache: The pools.
            slot_mapping: int32 [G, N], slot of each token in each cache group; out of range in padding.
            places: Of each layer.
            backend: Which kernels write.
            grid: The devices that the model is divided among; None for one.

        Returns:
            The pools, those of cross attention written to.
        """
        kv_cache = list(kv_cache)
        context = dataclasses.replace(self.encoder_context(tokens[None], length[None]), grid=grid)
        cross = self.cross_kv(self.encode(tokens[None], context), context)
        for layer, (k, v) in zip(self._cross_layers(), cross, strict=True):
            pool, group, _ = places[layer]
            written = k[0], v[0], slot_mapping[group]
            kv_cache[pool] = write_kv(kv_cache[pool], *written, backend=backend, grid=grid)
        return kv_cache

    def _cross_layers(self) -> list[int]:
        return [i for i, s in enumerate(self.kv_cache_specs()) if isinstance(s, CrossAttentionSpec)]
