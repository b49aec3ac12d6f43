"""Base class of all models, and base class of decoder-only models.

Letters in shapes: T token rows, B sequences, E hidden size, V vocabulary size. *T stands for [T] in a paged
pass and for [B, T] in a dense one. The letters in the shape of the KV cache are explained in attention.py.
"""

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
    """Interface that the engine and the checkpoint loader use for every family.

    A family creates its modules in `__init__` and implements the abstract methods.

    Args:
        config: An instance of the family's `config_class`.
        dtype: The dtype of weights and activations: float32 or bfloat16.
        rngs: Source of the random initial weights.

    Attributes:
        config_class: The class that reads the family's config.json.
        weight_table: Names of the weights in a checkpoint.
        is_last_stage: Whether the model computes logits. False for a pipeline stage that is not the last one.
    """

    config_class: ClassVar[Any]
    weight_table: ClassVar[WeightTable]
    # Path of the token embedding module if prompt embeddings may replace its output; else empty.
    embed_path: ClassVar[str] = ""
    config: Any
    is_last_stage: bool = True

    @abc.abstractmethod
    def __init__(self, config: Any, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None: ...

    @abc.abstractmethod
    def hidden(self, tokens: Int[Array, "*t"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the last hidden state of every token row.

        Args:
            tokens: int32 [*T], token ids.
            context: The context of this forward pass, which is passed to every module.

        Returns:
            float [*T, E].
        """

    @abc.abstractmethod
    def logits(self, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the logits for some hidden states.

        There is no `context` argument because the rows of `hidden` are not the token rows of the pass: they
        are only the rows from which tokens are sampled.

        Args:
            hidden: float [..., E].

        Returns:
            float32 [..., V].
        """

    @property
    @abc.abstractmethod
    def head(self) -> Linear | Embedding | None:
        """The module that computes logits: the LM head, or the token embedding table if the two are tied.

        None if the model has no logits of tokens.
        """

    @property
    def image_spec(self) -> ImageSpec | PatchSpec | None:
        """The format of images in the model's prompts; None if the model reads only text.

        A model with an image spec has a method `encode_images`.
        """
        return None

    def pooled_output(self, hidden: Float[Array, "b e"]) -> Float[Array, "b p"]:
        """Returns the model's output for pooled hidden states, for example the class logits of a classifier.

        The default is the hidden states themselves.

        Args:
            hidden: float32 [B, E], one pooled hidden state per sequence.

        Returns:
            float32 [B, P].
        """
        return hidden

    @abc.abstractmethod
    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Returns what each layer caches.

        The index of a spec is the layer index that `ForwardContext.attend`, `cross_attend` and `recur` take.
        """

    def paged(
        self,
        tokens: Int[Array, " t"],
        kv_cache: list[Array],
        metadata: AttentionMetadata,
        hooks: Mapping[str, Callable[[Array], Array]] = types.MappingProxyType({}),
        output_edits: Mapping[str, Callable[[Any, Array], Array]] = types.MappingProxyType({}),
    ) -> tuple[Float[Array, "t e"], list[Array]]:
        """Returns the last hidden state of every token row of a paged batch, and the updated pools.

        Args:
            tokens: int32 [T], token ids.
            kv_cache: The pool arrays: [P, N, K, S, D] for keys and values, [slots, ...] for recurrent states.
                The list itself is not modified.
            metadata: Positions of the token rows, block tables, and the pool array of each layer.
            hooks: Functions that are applied to the outputs of modules, by module path; see ForwardContext.
            output_edits: Functions that are applied before the hooks, by module path; see ForwardContext.

        Returns:
            float [T, E], the last hidden states, and the list of pool arrays after this step's writes.
        """
        kv_cache = list(kv_cache)
        context = self.paged_context(kv_cache, metadata)
        context = dataclasses.replace(context, hooks=hooks, output_edits=output_edits)
        return self.hidden(tokens, context), kv_cache

    def paged_context(self, kv_cache: list[Array], metadata: AttentionMetadata) -> ForwardContext:
        """Returns the context of a forward pass over a paged batch.

        Args:
            kv_cache: The pool arrays; see `paged`. During the pass, each array that is written is replaced in
                this list.
            metadata: Positions of the token rows, block tables, and the pool array of each layer.
        """
        cache = PagedKVCache(self.kv_cache_specs(), kv_cache, metadata)

        def recur(rule: Rule, layer: int, index: int, *inputs: Array) -> Array:
            return recur_paged(rule, metadata.kv_locations[layer].array + index, inputs, kv_cache, metadata)

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
    """Base class of decoder-only models.

    A family adds its modules and implements the abstract methods. With pipeline parallelism, an instance may
    be a stage that has only some of the layers; see parallel/stages.py.

    Attributes:
        is_first_stage: Whether this stage has the first layer and embeds tokens. If not, it receives hidden
            states in place of token ids.
        is_last_stage: Whether this stage has the last layer and the modules after it. If not, it returns
            hidden states for the next stage.
    """

    # Name of the attribute that holds the layers, and names of the modules that run before them. All other
    # modules run after the layers.
    layers_name: ClassVar[str] = "layers"
    pre_layer_names: ClassVar[tuple[str, ...]] = ("embed_tokens",)
    is_first_stage: bool = True

    @abc.abstractmethod
    def embed(self, tokens: Int[Array, "*t"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the input of the first layer.

        Args:
            tokens: int32 [*T], token ids.
            context: The context of this forward pass.

        Returns:
            float [*T, E].
        """

    @abc.abstractmethod
    def apply_layers(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of this stage's last layer.

        Args:
            x: float [*T, E], the input of this stage's first layer.
            context: The context of this forward pass.

        Returns:
            float [*T, E].
        """

    @abc.abstractmethod
    def final_norm(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Applies the final norm to the output of the last layer.

        Args:
            x: float [*T, E].
            context: The context of this forward pass.

        Returns:
            float [*T, E], the last hidden state.
        """

    def hidden(self, tokens: Int[Array, "*t"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the last hidden state of every token row, or the output of this pipeline stage.

        Args:
            tokens: int32 [*T], token ids; for a stage that does not have the first layer, float [*T, E], the
                output of the previous stage.
            context: The context of this forward pass.

        Returns:
            float [*T, E].
        """
        x = self.apply_layers(self.embed(tokens, context) if self.is_first_stage else tokens, context)
        return self.final_norm(x, context) if self.is_last_stage else x

    @property
    def pp_unsupported_reason(self) -> str:
        """The reason why the model cannot be split into pipeline stages; empty if it can."""
        return ""

    @property
    def own_layers(self) -> list[Module]:
        """The layers of this stage."""
        return [getattr(self, self.layers_name)[i] for i in self.layer_indices]

    @property
    def layer_indices(self) -> list[int]:
        """The indices of this stage's layers among all layers of the model."""
        layers = getattr(self, self.layers_name)
        return [i for i, layer in enumerate(layers) if not isinstance(layer, MissingLayer)]

    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t v"]:
        """Returns the logits of a dense causal batch, without a KV cache.

        Args:
            tokens: int32 [B, T], sequences of equal length.

        Returns:
            float32 [B, T, V].

        Raises:
            ValueError: If T is larger than max_position_embeddings.
        """
        limit = self.config.max_position_embeddings
        if tokens.shape[1] > limit:
            raise ValueError(f"the length of `tokens` must be at most {limit}, got {tokens.shape[1]}")
        return self.logits(self.hidden(tokens, self.dense_context(tokens)))

    def dense_context(self, tokens: Int[Array, "b t"]) -> ForwardContext:
        """Returns the context of a forward pass over a dense batch whose sequences all start at position 0.

        Args:
            tokens: int32 [B, T], token ids.
        """
        specs, by_layer = self.kv_cache_specs(), dict[int, tuple[Array, Array]]()

        def attend(layer: int, q: Array, k: Array | None, v: Array | None, **options: Any) -> Array:
            if k is not None and v is not None:
                by_layer[layer] = k, v
            out = dense_attention(q, *by_layer[layer], window=window_of(specs[layer]), **options)
            return out[..., : value_dim_of(specs[layer])]

        recur = functools.partial(recur_dense, specs, tokens.shape)
        return ForwardContext(self, dense_positions(tokens), attend, recur=recur)


def dense_positions(tokens: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Returns the positions of a dense batch whose sequences all start at position 0.

    Args:
        tokens: int32 [B, T], token ids.

    Returns:
        int32 [B, T].
    """
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
