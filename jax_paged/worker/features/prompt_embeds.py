"""Embedding vectors that replace the embeddings of prompt tokens, from `prompt_embeds` or from images."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_paged.config.engine_args import EngineArgs
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.errors import check
from jax_paged.models.weights import LoadedModel
from jax_paged.worker.input_batch import InputBatch


def embed_path(args: EngineArgs, loaded: LoadedModel) -> str:
    """Returns the path of the token embedding if prompts may contain embedding vectors, "" otherwise.

    Raises:
        ValueError: If prompt embeddings are enabled and the model does not support them.
    """
    path = loaded.model.embed_path if args.enable_prompt_embeds or loaded.model.image_spec else ""
    ok = bool(path) or not args.enable_prompt_embeds
    allowed = f"False because {loaded.architecture} does not support prompt embeddings"
    check(ok, "enable_prompt_embeds", True, allowed)
    return path


def embed_edits(
    paths: Sequence[str], embeds: Float[Array, "t e"], has_embeds: Int[Array, " t"]
) -> dict[str, Callable[..., Array]]:
    """Returns edits of module outputs that insert the embedding vectors of a step.

    The first part of a vector replaces the token's embedding. Each further part, which only images have, is
    added to the output of a later module (DeepStack).

    Args:
        paths: Path of the token embedding, then the paths of the modules for the further parts.
        embeds: One vector with all parts per token row; zeros for token rows without a vector.
        has_embeds: Whether each token row has a vector.
    """
    is_replaced = has_embeds[:, None] != 0
    first, *added = jnp.split(embeds, len(paths), axis=1)
    changes: dict[str, Callable[..., Array]] = {
        paths[0]: lambda x, y: jnp.where(is_replaced, first.astype(y.dtype), y)
    }
    for path, part in zip(paths[1:], added, strict=True):
        changes[path] = lambda x, y, part=part: y + part.astype(y.dtype)
    return changes


def step_embeds(batch: InputBatch, has_embeds: np.ndarray, output: SchedulerOutput, size: int) -> np.ndarray:
    """Returns the embedding vectors of a step, and marks the token rows that have one.

    Args:
        batch: State of the batch slots.
        has_embeds: Set to 1 for token rows with a vector, int32 [T].
        output: The step.
        size: Size of a vector with all parts.

    Returns:
        float32 [T, size].
    """
    embeds, first = np.zeros((len(has_embeds), size), np.float32), 0
    batch_slots = batch.slots_of(row.seq_id for row in output.scheduled).tolist()
    for row, batch_slot in zip(output.scheduled, batch_slots, strict=True):
        for position, vectors in batch.features.embeds.get(batch_slot, {}).items():
            start = max(row.start, position)
            stop = min(row.start + row.num_tokens, position + len(vectors))
            if start < stop:
                rows = slice(first + start - row.start, first + stop - row.start)
                embeds[rows, : vectors.shape[1]] = vectors[start - position : stop - position]
                has_embeds[rows] = 1
        first += row.num_tokens
    return embeds
