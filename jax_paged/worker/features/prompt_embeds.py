"""Vectors in place of prompt tokens: of prompt_embeds and of images."""

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
    """Returns the path of the token embedding if prompts may have vectors, "" otherwise.

    Raises:
        ValueError: If the model has no such path.
    """
    path = loaded.model.embed_path if args.enable_prompt_embeds or loaded.model.image_spec else ""
    ok = bool(path) or not args.enable_prompt_embeds
    check(ok, "enable_prompt_embeds", True, f"False for {loaded.architecture}")
    return path


def embed_edits(
    paths: Sequence[str], embeds: Float[Array, "t e"], has_embeds: Int[Array, " t"]
) -> dict[str, Callable[..., Array]]:
    """Returns edits of module outputs: vectors replace token embeddings, their other parts are added.

    Args:
        paths: The token embedding, then the modules to whose outputs the other parts are added.
        embeds: A vector per token row, with all parts; zeros in rows without one.
        has_embeds: Whether a token row has a vector.
    """
    is_own = has_embeds[:, None] != 0
    first, *added = jnp.split(embeds, len(paths), axis=1)
    changes: dict[str, Callable[..., Array]] = {
        paths[0]: lambda x, y: jnp.where(is_own, first.astype(y.dtype), y)
    }
    for path, part in zip(paths[1:], added, strict=True):
        changes[path] = lambda x, y, part=part: y + part.astype(y.dtype)
    return changes


def step_embeds(batch: InputBatch, has_embeds: np.ndarray, output: SchedulerOutput, size: int) -> np.ndarray:
    """Returns the vectors of a step, float32 [T, size]; sets has_embeds for the token rows with one."""
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
