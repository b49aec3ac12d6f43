"""Parts of the traced step that belong to features.

traced_step.py calls each of these functions at one place. A function adds nothing to the program if
the engine does not use its feature.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import AttentionMetadata
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.features.hooks import functions_by_path, recording_hooks
from jax_paged.worker.compilation.programs import StepResult, StepState
from jax_paged.worker.compilation.traced_values import ModuleEdits, TokenTargets, TracedStep
from jax_paged.worker.features import prompt_embeds
from jax_paged.worker.features.lora import adapter_edits, adapter_shapes
from jax_paged.worker.features.multi_step import decode_steps
from jax_paged.worker.features.speculation import verification
from jax_paged.worker.features.speculation.verification import accept, drafts_before
from jax_paged.worker.features.user_functions import logits_processors
from jax_paged.worker.sampling.sampler import SamplingBatch

__all__ = ["accept", "adapter_shapes", "decode_steps", "drafts_before"]


def module_edits(step: TracedStep) -> ModuleEdits:
    """Returns the edits that features make to modules in a forward pass: hooks, adapters, embeddings.

    The edits also collect the module outputs that a drafter reads.
    """
    features, edits = step.context.features, ModuleEdits()
    if features.hooks:
        first = step.context.model.num_weights
        params = step.weights[first : first + features.hook_structure.num_leaves]
        params = jax.tree.unflatten(features.hook_structure, params)
        columns = step.by_token(lax.bitcast_convert_type(step.fields["hook_args"], jnp.float32))
        edits.hooks = functions_by_path(features.hooks, params, columns, 1, edits.captured)
    if features.drafter is not None:
        edits.hooks = recording_hooks(features.drafter.paths, edits.hooks, edits.outputs)
    if features.lora is not None:
        edits.changes |= adapter_edits(features.lora, step)
    if step.inputs.embeds is not None:
        paths = features.embed_path, *features.added_paths
        edits.changes |= prompt_embeds.embed_edits(paths, step.inputs.embeds, step.fields["has_embeds"])
    return edits


def process(
    step: TracedStep,
    logits: Float[Array, "l v"],
    tokens: Int[Array, " t"],
    batch: SamplingBatch,
    state: StepState[Array],
) -> tuple[Float[Array, "l v"] | None, StepState[Array]]:
    """Applies logits processors.

    Returns:
        The processed logits, or None if the engine has no logits processors; and the state.
    """
    if not step.context.features.processors:
        return None, state
    fields = step.fields
    processed, states = logits_processors.process(
        step.context.features.processors,
        logits,
        state.processor_states,
        lax.bitcast_convert_type(fields["processor_args"], jnp.float32),
        fields["sample_slots"],
        tokens[fields["logits_rows"]],
        batch.position,
    )
    return processed, dataclasses.replace(state, processor_states=states)


def propose(
    step: TracedStep, tokens: Int[Array, " t"], state: StepState[Array]
) -> tuple[Int[Array, " t"], StepState[Array]]:
    """Replaces the draft tokens of a step with the drafts of the drafter on the device, if there is one."""
    drafter = step.context.features.drafter
    return (tokens, state) if drafter is None else verification.propose(drafter, step, tokens, state)


def observe(
    step: TracedStep,
    model: LanguageModel,
    metadata: AttentionMetadata,
    tokens: Int[Array, " t"],
    edits: ModuleEdits,
    targets: TokenTargets,
    state: StepState[Array],
) -> StepState[Array]:
    """Lets the drafter, if there is one, read the outputs of the model; returns the state."""
    drafter = step.context.features.drafter
    if drafter is None:
        return state
    return verification.observe(drafter, step, model, metadata, tokens, edits.outputs, targets, state)


def with_drafts(step: TracedStep, tokens: Int[Array, " t"], result: StepResult[Array]) -> StepResult[Array]:
    """Adds the drafts to the result if a drafter on the device has made them."""
    if step.context.features.drafter is None:
        return result
    drafts = tokens[None, step.fields["logits_rows"]]
    return dataclasses.replace(result, tokens=jnp.concatenate([result.tokens, drafts]))
