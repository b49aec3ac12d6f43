"""The traced step: weights, StepState and DeviceInputs in; StepResult and StepState out.

    traced_step   unpack --> write block tables --> [drafts] --> decode --> last tokens
    decode        forward --> logits --> [logits processors] --> sample --> token counts
    forward       attention metadata, module edits --> the model on the paged KV cache

Parts in brackets belong to features (traced_features.py). They are not traced if the engine does not use the
feature.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.core.model_runner_output import NO_TOKEN
from jax_paged.models.attention import AttentionMetadata
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.sampling_params import MAX_BIAS_IDS
from jax_paged.worker import traced_features
from jax_paged.worker.block_tables import tables_of, write_changes
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.compilation.programs import (
    DeviceInputs,
    Program,
    StepResult,
    StepState,
    TraceContext,
    packed_results,
)
from jax_paged.worker.compilation.traced_values import ModuleEdits, TokenTargets, TracedStep
from jax_paged.worker.packed_buffer import BufferOptions, layout, unpack
from jax_paged.worker.sampling.sampler import SampledTokens
from jax_paged.worker.sampling.token_counts import add_tokens


def with_drawn_tokens(fields: dict[str, Array], last_tokens: Int[Array, " s"]) -> Int[Array, " t"]:
    """Returns the tokens of a step, with NO_TOKEN replaced by the last token drawn for its batch slot.

    Args:
        fields: The unpacked buffer. Only the last token of a sequence is replaced.
        last_tokens: The last drawn token of each batch slot.
    """
    tokens, first, batch_slots = fields["tokens"], fields["query_start_loc"], fields["batch_slots"]
    rows = jnp.where(first[1:] > first[:-1], first[1:] - 1, len(tokens))  # out of range if unused
    last = tokens.at[rows].get(mode="clip")
    drawn = last_tokens.at[batch_slots].get(mode="clip")
    return tokens.at[rows].set(jnp.where(last == NO_TOKEN, drawn, last), mode="drop")


def buffer_options(context: TraceContext) -> BufferOptions:
    """Returns the properties that determine the fields of the packed buffer."""
    features = context.features
    return BufferOptions(
        num_groups=len(context.layout.groups),
        num_hook_columns=features.num_hook_columns,
        num_processor_columns=features.num_processor_columns,
        has_states=len(context.layout.states) > 0,
        has_mrope=features.has_mrope,
    )


def open_step(
    context: TraceContext,
    bucket: Bucket,
    weights: list[Array],
    block_tables: Int[Array, "g s m"],
    inputs: DeviceInputs[Array],
) -> tuple[TracedStep, Int[Array, "g s m"]]:
    """Unpacks the inputs of a step and applies its block table changes.

    Returns:
        The step, and the block tables of all batch slots with the changes.
    """
    fields = unpack(inputs.packed, bucket, buffer_options(context))
    block_tables = write_changes(block_tables, fields["table_changes"])
    tables = tables_of(block_tables, fields["batch_slots"])
    return TracedStep(context, bucket, weights, inputs, fields, tables), block_tables


def traced_step(
    context: TraceContext,
    bucket: Bucket,
    weights: list[Array],
    state: StepState[Array],
    inputs: DeviceInputs[Array],
) -> tuple[StepResult[Array], StepState[Array]]:
    """Computes one step; see StepProgram."""
    step, block_tables = open_step(context, bucket, weights, state.block_tables, inputs)
    state = dataclasses.replace(state, block_tables=block_tables)
    tokens = with_drawn_tokens(step.fields, state.last_tokens)
    if bucket.num_steps > 1:
        result, last, state = traced_features.decode_steps(decode, step, tokens, state)
        return result, with_last_tokens(state, step.fields["sample_slots"], last)
    if bucket.num_drafts:
        tokens, state = traced_features.propose(step, tokens, state)
    drawn, targets, result, state = decode(step, tokens, state)
    if bucket.num_drafts:
        result = traced_features.with_drafts(step, tokens, result)
    # The programs that read the hidden states of a mixed step expect max_num_batched_tokens rows.
    padding = 0 if bucket.is_decode else context.max_num_batched_tokens - bucket.num_tokens
    hidden: Any = result.hidden
    result = dataclasses.replace(result, hidden=jnp.pad(hidden, ((0, padding), (0, 0))))
    return result, with_last_tokens(state, targets.sample_slots, drawn.token_ids)


def decode(
    step: TracedStep, tokens: Int[Array, " t"], state: StepState[Array]
) -> tuple[SampledTokens, TokenTargets, StepResult[Array], StepState[Array]]:
    """Runs the model and draws a token from every logits row.

    Returns:
        The drawn tokens, the batch slots that receive and count them, the result, and the state. The returned
        state contains the new token counts and everything that the model and features have written, but not
        the new last_tokens.
    """
    context, fields = step.context, step.fields
    model = context.merge(step.weights)
    metadata = step.metadata()
    hidden, state, edits = forward(step, model, tokens, state, metadata)
    logits = context.logits(model, hidden[fields["logits_rows"]])
    num_drafts, drafts = step.bucket.num_drafts, None
    if num_drafts:
        drafts = traced_features.drafts_before(step, tokens, state.token_counts.shape[1])
    batch = step.sampling_batch(state.token_counts, drafts)
    processed, state = traced_features.process(step, logits, tokens, batch, state)
    drawn = context.sampling.sample(logits, batch, processed=processed, forced=fields["forced_tokens"][:, 0])
    targets = TokenTargets(fields["sample_slots"], batch.count_slots)
    if num_drafts:
        targets = traced_features.accept(step, tokens, drawn.token_ids, batch.count_slots)
    token_counts = add_tokens(state.token_counts, targets.count_slots, drawn.token_ids)
    state = dataclasses.replace(state, token_counts=token_counts)
    state = traced_features.observe(step, model, metadata, tokens, edits, targets, state)
    results, details = packed_results(drawn)
    result = StepResult(tokens=results, details=details, hidden=hidden, captured=edits.captured)
    return drawn, targets, result, state


def forward(
    step: TracedStep,
    model: LanguageModel,
    tokens: Int[Array, " t"],
    state: StepState[Array],
    metadata: AttentionMetadata,
) -> tuple[Float[Array, "t e"], StepState[Array], ModuleEdits]:
    """Runs the model on the paged KV cache.

    Returns:
        The hidden states of all token rows, the state, and the module edits with the values read from
        modules.
    """
    num_arrays = step.context.layout.num_arrays
    model_arrays, other_arrays = state.kv_cache[:num_arrays], state.kv_cache[num_arrays:]
    edits = traced_features.module_edits(step)
    x = tokens if step.inputs.hidden is None else step.inputs.hidden
    hidden, model_arrays = model.paged(x, model_arrays, metadata, edits.hooks, edits.changes)
    return hidden, dataclasses.replace(state, kv_cache=[*model_arrays, *other_arrays]), edits


def with_last_tokens(
    state: StepState[Array], batch_slots: Int[Array, " l"], tokens: Int[Array, " l"]
) -> StepState[Array]:
    """Returns the state with new last tokens for some batch slots; slots that do not exist are dropped."""
    last_tokens = state.last_tokens.at[batch_slots].set(tokens, mode="drop")
    return dataclasses.replace(state, last_tokens=last_tokens)


@dataclasses.dataclass(frozen=True)
class StepProgram(Program):
    """Program of one bucket: runs the model on all token rows and draws a token from every logits row.

    Its arguments are the weights, StepState (donated) and DeviceInputs. It returns StepResult and StepState.
    """

    bucket: Bucket

    def __str__(self) -> str:
        return str(self.bucket)

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""
        bucket = self.bucket

        def step(
            weights: list[Array], state: StepState[Array], inputs: DeviceInputs[Array]
        ) -> tuple[StepResult[Array], StepState[Array]]:
            return traced_step(context, bucket, weights, state, inputs)

        out_shardings: Any = context.replicated, context.state_sharding()
        jitted = jax.jit(step, donate_argnums=1, out_shardings=out_shardings)
        return jitted.trace(context.weights, context.state(), input_shapes(context, bucket))


def input_shapes(context: TraceContext, bucket: Bucket) -> DeviceInputs[jax.ShapeDtypeStruct]:
    """Returns the shapes of a step's inputs."""
    (_, size), num_logits = layout(bucket, buffer_options(context)), bucket.num_logits
    hidden_size, features = context.stage.hidden_size, context.features
    embeds = (bucket.num_tokens, features.total_embed_size), jnp.float32
    hidden = (bucket.num_tokens, hidden_size), context.dtype
    return DeviceInputs(
        packed=context.shape((size,), jnp.int32),
        bias_ids=context.shape((num_logits, MAX_BIAS_IDS), jnp.int32),
        bias_values=context.shape((num_logits, MAX_BIAS_IDS), jnp.float32),
        token_mask=context.shape((num_logits, context.num_mask_words), jnp.int32),
        adapters=traced_features.adapter_shapes(context) if bucket.has_adapters else [],
        embeds=context.shape(*embeds) if bucket.has_embeds else None,
        hidden=context.shape(*hidden) if hidden_size else None,
    )
