"""Programs that are compiled ahead of time, and the arrays and the context for which they are traced."""

import abc
import contextlib
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import Backend, CustomAttention
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.parallel.sharding import DeviceGrid, whole_logits
from jax_paged.worker.compilation.feature_set import FeatureSet
from jax_paged.worker.kv_cache import KVCacheLayout, kv_cache_sharding
from jax_paged.worker.loading.weights import FlatModel
from jax_paged.worker.sampling.sampler import SampledTokens, SamplerOptions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepState[T]:
    """Arrays that stay on the device between steps. Each step receives them, donated, and returns them.

    Programs receive the arrays in the order of the fields. S batch slots, G cache groups.

    Args:
        kv_cache: The arrays of blocks (the model's, then the drafter's), then the arrays of recurrent states.
        token_counts: int32 [S, V], see token_counts.py.
        block_tables: int32 [G, S, M], see block_tables.py. In a pipeline, a tuple with one array per stage.
        last_tokens: int32 [S], the last token drawn for each sequence. A step reads it here if it is
            dispatched before the host knows the token.
        processor_states: States of logits processors, each [S, ...]; see logits_processors.py.
        draft_states: States of the drafter on the device, each [S, ...].
    """

    kv_cache: list[T]
    token_counts: T
    block_tables: T
    last_tokens: T
    processor_states: list[T]
    draft_states: list[T]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceInputs[T]:
    """Arrays that a step reads in addition to weights and StepState. T token rows, L logits rows.

    Args:
        packed: The packed buffer, see packed_buffer.py.
        bias_ids: int32 [L, MAX_BIAS_IDS], see SamplingBatch.
        bias_values: float32 [L, MAX_BIAS_IDS], see SamplingBatch.
        token_mask: int32 [L, ceil(V / 32)], see SamplingBatch.
        adapters: Arrays of all adapter slots; empty unless the bucket has adapters.
        embeds: float32 [T, E], embeddings of token rows; None unless the bucket has embeddings.
        hidden: Hidden states of the token rows from the previous pipeline stage; None in the first stage.
    """

    packed: T
    bias_ids: T
    bias_values: T
    token_mask: T
    adapters: list[T] = dataclasses.field(default_factory=list)
    embeds: T | None = None
    hidden: T | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult[T]:
    """Results of a step. L logits rows, N most likely tokens to report, K steps of multi-step decoding.

    Args:
        tokens: int32 [4, L]: token ids, bits of their log-probabilities, whether the logits were finite,
            whether any token was allowed. If a drafter on the device makes drafts, a fifth row contains the
            input token of each logits row. In multi-step decoding [K, 5, B], see features/multi_step.py.
        details: int32 [L, 1 + 2N], or [K, B, 1 + 2N] in multi-step decoding: rank, ids of the most likely
            tokens, bits of their log-probabilities.
        hidden: Hidden states of all token rows; in a mixed step, padded to the largest step. None in
            multi-step decoding.
        captured: Values captured by hooks, by name: float32 [T, ...], or [K, B, ...] in multi-step decoding.
    """

    tokens: T
    details: T
    hidden: T | None
    captured: dict[str, T] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StageRole:
    """Position of a stage in its pipeline.

    Args:
        hidden_size: Size of the hidden states from the previous stage; 0 in the first stage.
        is_last: Whether this stage draws the tokens.
    """

    hidden_size: int = 0
    is_last: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TraceContext:
    """The model, the shapes and the devices for which programs are traced.

    Args:
        model: The model without its weights.
        weights: Arrays of all weights, or their shapes.
        layout: Layout of the KV cache.
        num_blocks: Number of blocks in the KV cache, including the null block.
        block_size: Number of tokens per block.
        dtype: Dtype of weights and activations.
        vocab_size: Number of columns of the logits.
        max_model_len: Maximum number of tokens of a sequence. It determines the number of block table
            columns.
        max_num_seqs: Number of batch slots.
        max_num_batched_tokens: Number of token rows of the largest step.
        backend: The attention backend.
        batch_invariant: Whether the result of a token must not depend on other tokens in the batch.
        mesh: The devices; None to lower programs for devices that are not present.
        features: Features that are traced into the programs.
        sampling: How tokens are drawn.
        is_expert_parallel: Whether experts are distributed over the devices, instead of dividing each expert.
        attend: Attention function that replaces the backend; None for the backend.
        min_shared_rows: Minimum number of sequences for cascade attention; 0 if it is off.
        num_state_slots: Number of slots for recurrent states, including one unused slot; 0 if no layer has
            such states.
        stage: Position in a pipeline.
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
    backend: Backend
    batch_invariant: bool
    mesh: Mesh | AbstractMesh | None
    features: FeatureSet
    sampling: SamplerOptions
    is_expert_parallel: bool = False
    attend: CustomAttention | None = None
    min_shared_rows: int = 0
    num_state_slots: int = 0
    stage: StageRole = StageRole()

    @property
    def max_blocks_per_seq(self) -> int:
        """The number of block table columns."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_mask_words(self) -> int:
        """The number of columns of token masks, for 32 tokens each."""
        return -(-self.vocab_size // 32)

    @property
    def grid(self) -> DeviceGrid | None:
        """The devices that divide the model; None for a single device."""
        if self.mesh is None or self.mesh.size == 1:
            return None
        return DeviceGrid(self.mesh, self.is_expert_parallel)

    @property
    def replicated(self) -> NamedSharding | None:
        """The sharding of all arrays except weights and KV cache: a copy on each device."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    @property
    def pool_sharding(self) -> NamedSharding | None:
        """The sharding of the KV cache arrays."""
        return None if self.mesh is None else kv_cache_sharding(self.mesh)

    @property
    def layouts(self) -> tuple[KVCacheLayout, ...]:
        """The layouts of the KV cache arrays: the model's, then the drafter's."""
        drafter = self.features.drafter
        return (self.layout,) if drafter is None else (self.layout, drafter.layout)

    @property
    def block_bytes(self) -> int:
        """The size of one block in all KV cache arrays together (bytes)."""
        return sum(layout.block_bytes(self.block_size) for layout in self.layouts)

    def shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape of an input that every device holds completely."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)

    def states(self, num_slots: int | None = None) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays of recurrent states.

        Args:
            num_slots: Number of slots; None for num_state_slots.
        """
        n, sharding = num_slots or self.num_state_slots, self.pool_sharding
        return [jax.ShapeDtypeStruct((n, *a.shape), a.dtype, sharding=sharding) for a in self.layout.states]

    def pool(self, num_blocks: int | None = None) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the KV cache arrays of blocks.

        Args:
            num_blocks: Number of blocks; None for the KV cache's.
        """
        arrays = []
        for layout in self.layouts:
            shape = layout.pool_shape(num_blocks or self.num_blocks, self.block_size)
            array = jax.ShapeDtypeStruct(shape, layout.dtype, sharding=self.pool_sharding)
            arrays += [array] * layout.num_block_arrays
        return arrays

    def kv_cache(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays of blocks and then of recurrent states, as in StepState."""
        return [*self.pool(), *self.states()]

    def state(self) -> StepState[jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays that stay on the device between steps."""
        num_groups, s = len(self.layout.groups), self.max_num_seqs
        return StepState(
            kv_cache=self.kv_cache(),
            token_counts=self.shape((s if self.stage.is_last else 0, self.vocab_size), jnp.int32),
            block_tables=self.shape((num_groups, s, self.max_blocks_per_seq), jnp.int32),
            last_tokens=self.shape((s,), jnp.int32),
            processor_states=[self.shape(*x) for x in self.features.processor_states(s)],
            draft_states=[self.shape(*x) for x in self.features.draft_states(s)],
        )

    def state_sharding(self) -> StepState[Any]:
        """Returns the shardings of `state` for jax.jit."""
        return StepState(
            kv_cache=[self.pool_sharding] * len(self.kv_cache()),
            token_counts=self.replicated,
            block_tables=self.replicated,
            last_tokens=self.replicated,
            processor_states=self.replicated,  # pyright: ignore[reportArgumentType]  # for the whole list
            draft_states=self.replicated,  # pyright: ignore[reportArgumentType]
        )

    def merge(self, weights: list[Array]) -> LanguageModel:
        """Returns the model with the given (traced) weights."""
        return self.model.merge(weights)

    def logits(self, model: LanguageModel, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the logits of hidden states. Every device holds all columns."""
        return whole_logits(model.logits(hidden), self.vocab_size, self.grid)


class Program(abc.ABC):
    """A program that is compiled ahead of time.

    Subclasses are frozen dataclasses, so that programs can be dictionary keys.

    Attributes:
        reads_hidden: Whether it reads hidden states of a step. In a pipeline, only the last stage has these.
    """

    reads_hidden: ClassVar[bool] = False

    @abc.abstractmethod
    def __str__(self) -> str:
        """Returns the name of the program in the compile plan."""

    @abc.abstractmethod
    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program for a context."""

    def lower(self, context: TraceContext, platforms: tuple[str, ...] | None = None) -> jax.stages.Lowered:
        """Traces and lowers the program, for the devices of its context or for other platforms."""
        with matmul_precision(context.dtype):
            return self.trace(context).lower(lowering_platforms=platforms)


def matmul_precision(dtype: jnp.dtype) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which float32 matrix products are computed in float32.

    GPUs would otherwise use TF32, whose rounding errors are large enough to change tokens.
    """
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


def bits(x: Array) -> Array:
    """Returns the bits of float32 numbers as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def packed_results(drawn: SampledTokens) -> tuple[Int[Array, "4 b"], Int[Array, "b n"]]:
    """Returns the arrays `tokens` and `details` of a StepResult."""
    flags = [drawn.is_finite.astype(jnp.int32), drawn.has_choice.astype(jnp.int32)]
    columns = [drawn.rank[:, None], drawn.top_token_ids, bits(drawn.top_logprobs)]
    return jnp.stack([drawn.token_ids, bits(drawn.logprob), *flags]), jnp.concatenate(columns, axis=1)
