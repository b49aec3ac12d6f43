"""What every family offers to the engine and the loader, and what all decoder families share."""

import abc
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import (
    AttentionMetadata,
    KVCacheSpec,
    dense_attention,
    value_dim_of,
    window_of,
)
from jax_paged.models.forward_context import ForwardContext, MissingLayer, Module
from jax_paged.models.hf_format import WeightTable
from jax_paged.models.image_inputs import ImageSpec, PatchSpec
from jax_paged.models.layers import Embedding, Linear
from jax_paged.models.paged_attention import PagedKVCache, cross_attention, paged_attention
from jax_paged.models.recurrent.recurrence import Rule, recur_dense, recur_paged
from jax_paged.pallas_kernels.grouped_matmul import grouped_matmul


class LanguageModel(nnx.Module):
    """What the engine and the loader ask of every family.

    A family adds its modules and the abstract methods.

    Args:
        config: Of the family's config_class.
        dtype: Of weights and activations.
        rngs: Where random weights come from.

    Attributes:
        ends: Whether it makes logits; a stage of a pipeline may not, see CausalLM.
    """

    config_class: ClassVar[Any]
    weight_table: ClassVar[WeightTable]
    # Where the table of token embeddings stands, if a prompt's vectors may stand for what it returns.
    embed_path: ClassVar[str] = ""
    config: Any
    ends: bool = True

    @abc.abstractmethod
    def __init__(self, config: Any, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None: ...

    @abc.abstractmethod
    def hidden(self, tokens: Int[Array, "*t"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the decoder's last hidden state of every token row.

        Args:
            tokens: int32, token ids.
            context: Goes to every module; says where the tokens stand and how they attend.
        """

    @abc.abstractmethod
    def logits(self, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the float32 logits of hidden states.

        There is no context: the rows are those of `hidden` that somebody samples from, not the token rows.
        """

    @property
    @abc.abstractmethod
    def head(self) -> Linear | Embedding | None:
        """What makes logits of hidden states: the table of token embeddings where the two are tied."""

    @property
    def image_spec(self) -> ImageSpec | PatchSpec | None:
        """How images stand in its prompts; None if it reads text alone. Else it has `encode_images`."""
        return None

    def pooled(self, hidden: Float[Array, "b e"]) -> Float[Array, "b p"]:
        """Returns what a pooled hidden state becomes, in float32: of a classifier, the logits of its classes.

        Args:
            hidden: float32.
        """
        return hidden

    @abc.abstractmethod
    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Returns what each layer caches."""

    def paged(
        self,
        tokens: Int[Array, " t"],
        kv_cache: list[Array],
        metadata: AttentionMetadata,
        hooks: Mapping[str, Callable[[Array], Array]] = types.MappingProxyType({}),
        changes: Mapping[str, Callable[[Any, Array], Array]] = types.MappingProxyType({}),
    ) -> tuple[Float[Array, "t e"], list[Array]]:
        """Returns the last hidden state of every token row of a paged batch, and the pools written to.

        Args:
            tokens: int32 [T], token ids.
            kv_cache: The pools, [P, N, K, S, D] each.
            metadata: Where the token rows stand, and which pool belongs to which layer.
            hooks: As ForwardContext has them; so are changes.
            changes: See hooks.
        """
        kv_cache = list(kv_cache)
        context = self.paged_context(kv_cache, metadata)
        context = dataclasses.replace(context, hooks=hooks, changes=changes)
        return self.hidden(tokens, context), kv_cache

    def paged_context(self, kv_cache: list[Array], metadata: AttentionMetadata) -> ForwardContext:
        """Returns the context of a pass over a paged batch.

        Args:
            kv_cache: The pools; as the pass goes on, the list gets the pools that were written to.
            metadata: Where the token rows stand, and which pool belongs to which layer.
        """
        cache = PagedKVCache(self.kv_cache_specs(), kv_cache, metadata)

        def recur(rule: Rule, layer: int, index: int, *inputs: Array) -> Array:
            return recur_paged(rule, metadata.places[layer].array + index, inputs, kv_cache, metadata)

        return ForwardContext(
            self,
            metadata.positions,
            attend=functools.partial(paged_attention, cache),
            cross_attend=functools.partial(cross_attention, cache),
            grouped_matmul=functools.partial(grouped_matmul, backend=metadata.backend),
            recur=recur,
            grid=metadata.grid,
            mrope_positions=metadata.mrope_positions,
        )


class CausalLM(LanguageModel):
    """A decoder; a family adds its modules and the abstract methods.

    It may be one stage of a pipeline, which has some of the layers (see stages.py).

    Attributes:
        begins: Whether it has the first layer, and embeds tokens; else it gets hidden states in their place.
        ends: Whether it has the last layer, and what follows it; else it returns hidden states for the next.
    """

    # Where its layers are, and what stands before them; all else follows them.
    layers_name: ClassVar[str] = "layers"
    first_names: ClassVar[tuple[str, ...]] = ("embed_tokens",)
    begins: bool = True

    @abc.abstractmethod
    def embed(self, tokens: Int[Array, "*t"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns what goes into the first layer."""

    @abc.abstractmethod
    def apply_layers(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns what comes out of the last layer."""

    @abc.abstractmethod
    def final_norm(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the last hidden state, of what has come out of the last layer."""

    def hidden(self, tokens: Int[Array, "*t"], context: ForwardContext) -> Float[Array, "*t e"]:
        x = self.apply_layers(self.embed(tokens, context) if self.begins else tokens, context)
        return self.final_norm(x, context) if self.ends else x

    @property
    def pp_unsupported_reason(self) -> str:
        """Why it can't be cut into stages; empty if it can."""
        return ""

    @property
    def own_layers(self) -> list[Module]:
        """The layers that it has, without those of other stages."""
        return [getattr(self, self.layers_name)[i] for i in self.own_places]

    @property
    def own_places(self) -> list[int]:
        """The places of these among all layers."""
        layers = getattr(self, self.layers_name)
        return [i for i, layer in enumerate(layers) if not isinstance(layer, MissingLayer)]

    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t v"]:
        """Returns the float32 logits of a dense causal batch, without a cache.

        Raises:
            ValueError: If the texts are longer than the model's maximum.
        """
        limit = self.config.max_position_embeddings
        if tokens.shape[1] > limit:
            raise ValueError(f"the length of `tokens` must be at most {limit}, got {tokens.shape[1]}")
        return self.logits(self.hidden(tokens, self.dense_context(tokens)))

    def dense_context(self, tokens: Int[Array, "b t"]) -> ForwardContext:
        """Returns the context of a pass over a dense batch, whose texts all start at position 0."""
        specs, given = self.kv_cache_specs(), dict[int, tuple[Array, Array]]()

        def attend(layer: int, q: Array, k: Array | None, v: Array | None, **options: Any) -> Array:
            if k is not None and v is not None:
                given[layer] = k, v
            out = dense_attention(q, *given[layer], window=window_of(specs[layer]), **options)
            return out[..., : value_dim_of(specs[layer])]

        recur = functools.partial(recur_dense, specs, tokens.shape)
        return ForwardContext(self, dense_positions(tokens), attend, recur=recur)


def dense_positions(tokens: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Returns the positions of a dense batch, whose texts all start at position 0."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
