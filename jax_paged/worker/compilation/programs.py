"""What is compiled ahead of time: each program is a value that can be traced for a model and its limits."""

import abc
import contextlib
import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import Attend, Backend
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.features.hooks import Hook, at_paths
from jax_paged.models.features.lora.layers import LoraLayout
from jax_paged.models.features.multimodal import ImageSpec, PatchSpec
from jax_paged.models.features.pooling import PoolingSpec
from jax_paged.models.parallel.sharding import TENSOR, DeviceGrid, whole_logits
from jax_paged.worker.features.speculation.drafter import Drafter
from jax_paged.worker.features.user_functions.logits_processors import LogitsProcessor, state_shapes
from jax_paged.worker.kv_cache import KVCacheLayout, kv_cache_sharding
from jax_paged.worker.loading.weights import FlatModel
from jax_paged.worker.sampling.sampler import SampledTokens, Sampler


class SeatArrays[T](NamedTuple):
    """What the device keeps of every sequence beside the pool, by seat; steps take it and hand it back.

    Args:
        token_counts: int32 [S, V], see token_counts.py.
        block_tables: int32 [G, S, M], see block_tables.py; of a pipeline a tuple, with one per stage.
        last_tokens: int32 [S], the token that was drawn last for each sequence; a step that begins before the
            host knows it reads it here.
        processor_states: Of logits processors, [S, ...] each; see logits_processors.py.
        draft_states: Of what drafts, [S, ...] each.
    """

    token_counts: T
    block_tables: T
    last_tokens: T
    processor_states: list[T]
    draft_states: list[T]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TraceContext:
    """What programs are traced for: a model, the shapes of what it works on, and where these lie.

    Args:
        model: The model without its weights.
        weights: Arrays of all weights, or their shapes.
        layout: Of the pool.
        num_blocks: Blocks of the pool, null block included.
        num_state_slots: Slots for states, one that nobody has included; 0 if no layer keeps any.
        block_size: Tokens per block.
        dtype: Of weights and activations.
        vocab_size: Columns of the logits.
        max_model_len: Maximum tokens of a sequence; sets the columns of block tables.
        max_num_seqs: Seats.
        max_num_batched_tokens: Token rows of the largest step.
        max_logprobs: Most likely tokens that are reported.
        backend: Which kernels attend.
        batch_invariant: Whether a token's sums may not depend on what is computed beside it.
        mesh: Where everything lies; None leaves that open, to lower for devices that are not there.
        splits_experts: Whether each expert is whole on one of several devices.
        is_processed: Whether log-probabilities are those of the processed logits.
        attend: Attends in the backend's place; None for the backend.
        sampler: Chooses tokens in the sampler's place; None for the sampler.
        processors: Change logits ahead of the sampler.
        hooks: Traced into the steps.
        hook_params: Structure of their parameters, which lie behind the weights.
        captured: What hooks capture of a row, by name: shapes.
        shares_prefixes: Whether rows may attend to leading blocks together, see shared_prefixes.py.
        pooling: What is made of pooled hidden states; None if nobody pools.
        draft: What drafts tokens on the device; None if nothing does.
        lora: The arrays of adapters; None if requests have none.
        embed_path: Where the table of token embeddings stands in the model, if prompts may have vectors.
        embed_size: Numbers of such a vector.
        image_spec: How prompts have images; None if they have none.
        before_size: Numbers of the hidden states that a stage of a pipeline gets from the one before; 0 in a
            first stage.
        is_last: Whether tokens are drawn here, and not in another stage that follows.
    """

    model: FlatModel[LanguageModel]
    weights: list[Array] | list[jax.ShapeDtypeStruct]
    layout: KVCacheLayout
    num_blocks: int
    block_size: int
    dtype: jnp.dtype
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    backend: Backend
    batch_invariant: bool
    mesh: Mesh | AbstractMesh | None
    splits_experts: bool = False
    is_processed: bool = False
    attend: Attend | None = None
    sampler: Sampler | None = None
    processors: tuple[LogitsProcessor, ...] = ()
    hooks: tuple[Hook, ...] = ()
    hook_params: Any = None
    captured: Mapping[str, tuple[int, ...]] = types.MappingProxyType({})
    shares_prefixes: bool = False
    pooling: PoolingSpec | None = None
    draft: Drafter | None = None
    lora: LoraLayout | None = None
    embed_path: str = ""
    embed_size: int = 0
    image_spec: ImageSpec | PatchSpec | None = None
    before_size: int = 0
    num_state_slots: int = 0
    is_last: bool = True

    @property
    def added_paths(self) -> tuple[str, ...]:
        """The modules to whose outputs further parts of a token's vector are added."""
        return self.image_spec.added_paths if self.image_spec else ()

    @property
    def embeds_size(self) -> int:
        """Numbers of a token's vector with these parts."""
        return self.embed_size * (1 + len(self.added_paths))

    @property
    def has_mrope(self) -> bool:
        """Whether tokens may have other rotary positions than those in their text."""
        return isinstance(self.image_spec, PatchSpec)

    @property
    def max_blocks_per_seq(self) -> int:
        """Columns of block tables."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_mask_words(self) -> int:
        """Columns of token masks, 32 tokens each."""
        return -(-self.vocab_size // 32)

    @property
    def grid(self) -> DeviceGrid | None:
        """The devices that the model is divided among; None for one."""
        if self.mesh is None or self.mesh.size == 1:
            return None
        return DeviceGrid(self.mesh, self.splits_experts)

    @property
    def replicated(self) -> NamedSharding | None:
        """How everything but weights and pool lies on the mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    @property
    def pool_sharding(self) -> NamedSharding | None:
        """How the arrays of the pool lie on the mesh."""
        return None if self.mesh is None else kv_cache_sharding(self.mesh)

    @property
    def layouts(self) -> tuple[KVCacheLayout, ...]:
        """Of the arrays of the pool: those of the model, then those of what drafts."""
        return (self.layout,) if self.draft is None else (self.layout, self.draft.layout)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all arrays of the pool together."""
        return sum(layout.block_bytes(self.block_size) for layout in self.layouts)

    def shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape of an input that lies on every device."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)

    def states(self, num_slots: int | None = None) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays of states, or of as many with another number of slots."""
        n, sharding = num_slots or self.num_state_slots, self.pool_sharding
        return [jax.ShapeDtypeStruct((n, *a.shape), a.dtype, sharding=sharding) for a in self.layout.states]

    def pool(self, num_blocks: int | None = None) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the pool's arrays of blocks, or of as many with another number of blocks."""
        arrays = []
        for layout in self.layouts:
            shape = layout.pool_shape(num_blocks or self.num_blocks, self.block_size)
            array = jax.ShapeDtypeStruct(shape, layout.dtype, sharding=self.pool_sharding)
            arrays += [array] * layout.num_pools
        return arrays

    def kv_cache(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays that steps take and return: those of blocks, then of states."""
        return [*self.pool(), *self.states()]

    def seat_arrays(self) -> SeatArrays[jax.ShapeDtypeStruct]:
        """Returns the shapes of what the device keeps by seat."""
        num_groups, s = len(self.layout.groups), self.max_num_seqs
        return SeatArrays(
            token_counts=self.shape((s if self.is_last else 0, self.vocab_size), jnp.int32),
            block_tables=self.shape((num_groups, s, self.max_blocks_per_seq), jnp.int32),
            last_tokens=self.shape((s,), jnp.int32),
            processor_states=[self.shape(x.shape, x.dtype) for x in state_shapes(self.processors, s)],
            draft_states=[self.shape(*x) for x in self.draft.states(s)] if self.draft else [],
        )

    def lora_arrays(self, num_slots: int | None = None) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays of adapters, or of as many as have so many slots."""
        if (lora := self.lora) is None:
            return []
        if self.mesh is None:
            grid, shardings = DeviceGrid(AbstractMesh((1,), (TENSOR,))), [None] * len(lora.splits)
        else:
            grid = DeviceGrid(self.mesh)
            shardings = [grid.sharding(split) for split in lora.splits]
        shapes = lora.shapes((num_slots or lora.num_slots) * lora.rank, grid)
        pairs = zip(shapes, shardings, strict=True)
        return [jax.ShapeDtypeStruct(shape, lora.dtype, sharding=where) for shape, where in pairs]

    def merge(self, weights: list[Array]) -> LanguageModel:
        """Returns the model with the weights that a program is traced with."""
        return self.model.merge(weights)

    def logits(self, model: LanguageModel, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the logits of hidden states; every device gets all of them, at once."""
        return whole_logits(model.logits(hidden), self.vocab_size, self.grid)

    def hooks_at(
        self, weights: list[Array], columns: Float[Array, "t columns"], captured: dict[str, Array]
    ) -> dict[str, Callable[[Array], Array]]:
        """Returns the hooks as a ForwardContext of token rows has them; see hooks.at_paths."""
        first = self.model.num_weights
        params = jax.tree.unflatten(self.hook_params, weights[first : first + self.hook_params.num_leaves])
        return at_paths(self.hooks, params, columns, 1, captured)


class Program(abc.ABC):
    """A program that is compiled ahead of time; its subclasses are frozen dataclasses, and keys of dicts."""

    @abc.abstractmethod
    def __str__(self) -> str:
        """Returns its name in the compile plan."""

    @abc.abstractmethod
    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces it."""

    def lower(self, context: TraceContext, platforms: tuple[str, ...] | None = None) -> jax.stages.Lowered:
        """Traces and lowers it, for the devices of its context or for other platforms."""
        with matmul_precision(context.dtype):
            return self.trace(context).lower(lowering_platforms=platforms)


def matmul_precision(dtype: jnp.dtype) -> contextlib.AbstractContextManager[None]:
    """Makes float32 mean float32: GPUs would multiply in TF32, which is not exact to the token."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


def bits(x: Array) -> Array:
    """Returns the bits of float32 numbers as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def packed_results(drawn: SampledTokens) -> tuple[Int[Array, "4 b"], Int[Array, "b n"]]:
    """Returns what a step reports of its tokens; see StepProgram."""
    flags = [drawn.is_finite.astype(jnp.int32), drawn.has_choice.astype(jnp.int32)]
    columns = [drawn.rank[:, None], drawn.top_token_ids, bits(drawn.top_logprobs)]
    return jnp.stack([drawn.token_ids, bits(drawn.logprob), *flags]), jnp.concatenate(columns, axis=1)
