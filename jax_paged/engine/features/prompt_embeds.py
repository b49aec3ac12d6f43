"""Prompts that consist of embedding vectors instead of tokens (`prompt_embeds`)."""

from typing import Any

import numpy as np

from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.request import PromptEmbeds
from jax_paged.engine.prompt_reader import PLACEHOLDER, TokenizedPrompt
from jax_paged.errors import ArgumentError, TooLongError, check


def read_embeds(prompt: dict[str, Any], config: EngineConfig) -> TokenizedPrompt:
    """Checks a prompt of embedding vectors, and returns it with one placeholder token per vector.

    Args:
        prompt: A dict with "prompt_embeds", numbers [tokens, hidden_size], and optionally "cache_salt".
        config: Engine configuration.

    Raises:
        ValueError: If the prompt is malformed or too long, or if the engine does not accept embeddings.
    """
    size = config.prompt_embed_size
    check(
        prompt.keys() <= {"prompt_embeds", "cache_salt"},
        "prompt",
        prompt,
        'a dict with "prompt_embeds" and optionally "cache_salt"',
    )
    if not size:
        allowed = "unset because the engine was made without enable_prompt_embeds=True"
        raise ArgumentError("prompt_embeds", prompt["prompt_embeds"], allowed)
    given, salt = prompt["prompt_embeds"], prompt.get("cache_salt")
    check(salt is None or isinstance(salt, str), "cache_salt", salt, "a string")
    try:
        array = np.asarray(given)
        with np.errstate(over="ignore"):  # values that overflow are rejected below
            rows = array.astype("<f4")
    except (TypeError, ValueError) as error:
        raise ArgumentError("prompt_embeds", given, f"an array of numbers ({error})") from error
    is_number = array.dtype.kind in "fiu" or array.dtype.name == "bfloat16"
    shape, allowed = array.shape, f"[tokens, {size}] with at least one token"
    check(is_number, "prompt_embeds", str(array.dtype), "a numeric dtype", aspect="the dtype of")
    ok = len(shape) == 2 and shape[0] > 0 and shape[1] == size
    check(ok, "prompt_embeds", shape, allowed, aspect="the shape of")
    if not np.isfinite(rows).all():
        num_bad = int(rows.size - np.isfinite(rows).sum())
        raise ArgumentError("prompt_embeds", num_bad, "0", aspect="the number of non-finite values in")
    # A prompt that is too long is rejected before its vectors are copied.
    if len(rows) >= config.max_model_len:
        raise TooLongError(len(rows), config.max_model_len, num_reserved=1)
    embeds = PromptEmbeds(len(rows), np.ascontiguousarray(rows).tobytes())
    return TokenizedPrompt(None, [PLACEHOLDER] * len(rows), salt, embeds)
