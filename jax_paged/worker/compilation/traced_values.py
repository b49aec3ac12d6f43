"""Values of a step while it is traced."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_paged.models.attention import AttentionMetadata
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.compilation.programs import DeviceInputs, TraceContext
from jax_paged.worker.packed_buffer import sampling_batch
from jax_paged.worker.sampling.sampler import SamplingBatch


@dataclasses.dataclass
class ModuleEdits:
    """Edits of module outputs in one forward pass, and values read there; see ForwardContext.

    Args:
        changes: Functions of a module's input and output rows, by the module's path.
        hooks: Functions of a module's output, by the module's path.
        captured: Values captured by hooks, by name; filled by the pass.
        outputs: Outputs of the modules that the drafter reads, by path; filled by the pass.
    """

    changes: dict[str, Callable[..., Array]] = dataclasses.field(default_factory=dict)
    hooks: dict[str, Callable[[Array], Array]] = dataclasses.field(default_factory=dict)
    captured: dict[str, Array] = dataclasses.field(default_factory=dict)
    outputs: dict[str, Array] = dataclasses.field(default_factory=dict)


class DrawnTokens(NamedTuple):
    """Sequences that go on after a step, and from where.

    Args:
        sample_slots: int32 [L], the batch slot that takes the token of each logits row; S for none.
        count_slots: int32 [L], the batch slot in whose token counts it is counted; S for none.
    """

    sample_slots: Int[Array, " l"]
    count_slots: Int[Array, " l"]


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """Inputs of a step while it is traced.

    Args:
        context: Model and limits.
        bucket: The shape.
        weights: Of the model.
        inputs: Arrays of the step.
        fields: Fields of the packed buffer.
        tables: int32 [G, B, M], block tables of the scheduled sequences.
    """

    context: TraceContext
    bucket: Bucket
    weights: list[Array]
    inputs: DeviceInputs[Array]
    fields: dict[str, Array]
    tables: Int[Array, "g b m"]

    def with_fields(self, **fields: Array) -> "TracedStep":
        """Returns the step with other values of some fields."""
        return dataclasses.replace(self, fields=self.fields | fields)

    def metadata(self) -> AttentionMetadata:
        """Returns what the model's layers read of the step."""
        context, fields = self.context, self.fields
        names = ["positions", "slot_mapping", "context_lens", "query_start_loc"]
        names += ["state_slots"] * bool(context.layout.states)
        names += ["mrope_positions"] * context.features.has_mrope
        shares_prefixes = 0 < context.min_shared_rows <= self.bucket.num_seqs
        return AttentionMetadata(
            **{name: fields[name] for name in names},
            block_tables=self.tables,
            is_decode=self.bucket.is_decode,
            backend=context.backend,
            places=context.layout.places,
            is_row_by_row=context.batch_invariant,
            attend=context.attend,
            grid=context.grid,
            shared_blocks=fields["shared_blocks"] if shares_prefixes else None,
        )

    def sampling_batch(
        self, token_counts: Int[Array, "s v"], drafts: Int[Array, "l k"] | None = None
    ) -> SamplingBatch:
        """Returns the sampling parameters of all logits rows; `drafts` precede each of them."""
        inputs = self.inputs
        return sampling_batch(
            self.fields, token_counts, inputs.bias_ids, inputs.bias_values, inputs.token_mask, drafts
        )

    def by_token(self, rows: Array) -> Array:
        """Returns the value of its sequence for each token row; 0 in padding."""
        if self.bucket.is_decode:
            return rows
        token = jnp.arange(self.bucket.num_tokens)[:, None]
        row = jnp.sum(token >= self.fields["query_start_loc"][1:], axis=1)
        return rows.at[row].get(mode="fill", fill_value=0)
