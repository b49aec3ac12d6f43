"""Values of a step that exist while it is traced."""

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
    """Edits of module outputs in one forward pass, and values that are read from modules; see ForwardContext.

    Args:
        changes: By module path: a function of the module's input rows and output rows that returns new output
            rows.
        hooks: By module path: a function of the module's output that returns a new output.
        captured: Values captured by hooks, by name. The pass fills it.
        outputs: Outputs of the modules that the drafter reads, by path. The pass fills it.
    """

    changes: dict[str, Callable[..., Array]] = dataclasses.field(default_factory=dict)
    hooks: dict[str, Callable[[Array], Array]] = dataclasses.field(default_factory=dict)
    captured: dict[str, Array] = dataclasses.field(default_factory=dict)
    outputs: dict[str, Array] = dataclasses.field(default_factory=dict)


class TokenTargets(NamedTuple):
    """Batch slots that receive and count the tokens drawn in a step (SampledTokens).

    Args:
        sample_slots: int32 [L], the batch slot that receives the token of each logits row; S for none.
        count_slots: int32 [L], the batch slot in whose token counts the token is counted; S for none.
    """

    sample_slots: Int[Array, " l"]
    count_slots: Int[Array, " l"]


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """The inputs of a step while it is traced.

    Args:
        context: The context for which the step is traced.
        bucket: The shape of the step.
        weights: The weights of the model, followed by the weights of features.
        inputs: The arrays of the step.
        fields: The unpacked buffer.
        tables: int32 [G, B, M], the block tables of the scheduled sequences.
    """

    context: TraceContext
    bucket: Bucket
    weights: list[Array]
    inputs: DeviceInputs[Array]
    fields: dict[str, Array]
    tables: Int[Array, "g b m"]

    def with_fields(self, **fields: Array) -> "TracedStep":
        """Returns the step with some fields replaced."""
        return dataclasses.replace(self, fields=self.fields | fields)

    def metadata(self) -> AttentionMetadata:
        """Returns the attention metadata of the step."""
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
            kv_locations=context.layout.locations,
            is_row_by_row=context.batch_invariant,
            attend=context.attend,
            grid=context.grid,
            shared_blocks=fields["shared_blocks"] if shares_prefixes else None,
        )

    def sampling_batch(
        self, token_counts: Int[Array, "s v"], drafts: Int[Array, "l k"] | None = None
    ) -> SamplingBatch:
        """Returns the inputs of the sampler for all logits rows.

        Args:
            token_counts: Token counts of all batch slots.
            drafts: The drafts that precede each logits row; None for none.
        """
        inputs = self.inputs
        return sampling_batch(
            self.fields, token_counts, inputs.bias_ids, inputs.bias_values, inputs.token_mask, drafts
        )

    def by_token(self, rows: Array) -> Array:
        """Returns for each token row the value of its sequence; 0 for padding."""
        if self.bucket.is_decode:
            return rows
        token = jnp.arange(self.bucket.num_tokens)[:, None]
        row = jnp.sum(token >= self.fields["query_start_loc"][1:], axis=1)
        return rows.at[row].get(mode="fill", fill_value=0)
