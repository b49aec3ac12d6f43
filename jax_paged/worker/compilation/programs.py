"""What is compiled ahead of time: each program is a value that can be traced for a model and its limits."""

import abc
import contextlib
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import Attend, Backend
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.parallel.sharding import DeviceGrid, whole_logits
from jax_paged.worker.compilation.feature_set import FeatureSet
from jax_paged.worker.kv_cache import KVCacheLayout, kv_cache_sharding
from jax_paged.worker.loading.weights import FlatModel
from jax_paged.worker.sampling.sampler import SampledTokens, SamplerOptions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepState[T]:
    """Arrays that stay on the device between steps. A step takes them, donated, and returns them.

    The order of the fields is the order of a program's arguments. S batch slots, G cache groups.

    Args:
        kv_cache: The arrays of blocks, then those of recurrent states.
        token_counts: int32 [S, V], see token_counts.py.
        block_tables: int32 [G, S, M], see block_tables.py; a tuple with one per stage in a pipeline.
        last_tokens: int32 [S], the last token drawn for each sequence. A step that is dispatched before the
            host knows this token reads it here.
        processor_states: States of logits processors, [S, ...] each; see logits_processors.py.
        draft_states: States of what drafts on the device, [S, ...] each.
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
    """Arrays that a step reads beside weights and StepState. T token rows, L logits rows.

    Args:
        packed: The packed buffer, see packed_buffer.py.
        bias_ids: int32 [L, MAX_BIAS_IDS], see SamplingBatch; so are the two that follow.
        bias_values: float32 [L, MAX_BIAS_IDS].
        token_mask: int32 [L, ceil(V / 32)].
        adapters: Arrays of all adapter slots; empty unless the bucket has adapters.
        embeds: float32 [T, E], vectors of token rows; None unless the bucket has embeddings.
        hidden: Hidden states of the token rows from the previous pipeline stage; None in the first one.
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
    """Results of a step. L logits rows, N reported likely tokens, K decode steps of multi-step decoding.

    Args:
        tokens: int32 [4, L]: token ids, bits of their log-probabilities, whether the logits were finite,
            whether any token could be chosen. If drafts are made on the device, a fifth row has the tokens
            that precede the logits rows. Multi-step decoding returns [K, 5, B], see features/multi_step.py.
        details: int32 [L, 1 + 2N] or [K, B, 1 + 2N]: rank, most likely token ids, bits of their
            log-probabilities.
        hidden: Hidden states of all token rows, padded to those of the largest step if the step is mixed;
            None in multi-step decoding.
        captured: Values captured by hooks, float32 [T, ...] or [K, B, ...], by name.
    """

    tokens: T
    details: T
    hidden: T | None
    captured: dict[str, T] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StageRole:
    """Position of a stage in its pipeline.

    Args:
        hidden_size: Columns of the hidden states from the previous stage; 0 in the first one.
        is_last: Whether this stage draws the tokens.
    """

    hidden_size: int = 0
    is_last: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TraceContext:
    """What programs are traced for: a model, the shapes of its inputs, and their devices.

    Args:
        model: The model without its weights.
        weights: Arrays of all weights, or their shapes.
        layout: Of the pool.
        num_blocks: Blocks of the pool, null block included.
        block_size: Tokens per block.
        dtype: Of weights and activations.
        vocab_size: Columns of the logits.
        max_model_len: Maximum tokens of a sequence; sets the columns of block tables.
        max_num_seqs: Batch slots.
        max_num_batched_tokens: Token rows of the largest step.
        backend: Which kernels attend.
        batch_invariant: Whether a token's sums may not depend on what is computed beside it.
        mesh: The devices; None leaves them open, to lower for devices that are not there.
        features: Features that are traced into the programs.
        sampling: How tokens are drawn.
        splits_experts: Whether each expert is whole on one of several devices.
        attend: Attends in the backend's place; None for the backend.
        min_shared_rows: Fewest sequences of a step that may attend to common leading blocks together; 0 if
            none may.
        num_state_slots: Slots for recurrent states, one unused slot included; 0 if no layer has such states.
        stage: Role in a pipeline.
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
    splits_experts: bool = False
    attend: Attend | None = None
    min_shared_rows: int = 0
    num_state_slots: int = 0
    stage: StageRole = StageRole()

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
        """Layouts of the pool's arrays: those of the model, then those of the drafter."""
        drafter = self.features.drafter
        return (self.layout,) if drafter is None else (self.layout, drafter.layout)

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
        """Returns the shardings of `state`, as jax.jit takes them."""
        return StepState(
            kv_cache=[self.pool_sharding] * len(self.kv_cache()),
            token_counts=self.replicated,
            block_tables=self.replicated,
            last_tokens=self.replicated,
            processor_states=self.replicated,  # pyright: ignore[reportArgumentType]  # of all in the list
            draft_states=self.replicated,  # pyright: ignore[reportArgumentType]
        )

    def merge(self, weights: list[Array]) -> LanguageModel:
        """Returns the model with the weights that a program is traced with."""
        return self.model.merge(weights)

    def logits(self, model: LanguageModel, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the logits of hidden states; every device gets all of them, at once."""
        return whole_logits(model.logits(hidden), self.vocab_size, self.grid)


class Program(abc.ABC):
    """A program that is compiled ahead of time; its subclasses are frozen dataclasses, and keys of dicts.

    Attributes:
        reads_hidden: Whether it reads hidden states of a step, which only the last stage of a pipeline has.
    """

    reads_hidden: ClassVar[bool] = False

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
