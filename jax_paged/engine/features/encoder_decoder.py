"""Prompts of encoder-decoder models."""

from collections.abc import Callable
from typing import Any

from jax_paged.engine.prompt_reader import TokenizedPrompt
from jax_paged.errors import ArgumentError, check

_NAMES = {"encoder_prompt", "decoder_prompt"}


def read_pair(
    prompt: Any, tokenize: Callable[[Any], TokenizedPrompt], start_token_id: int | None
) -> tuple[TokenizedPrompt | None, TokenizedPrompt]:
    """Returns the prompt of the encoder, None without an encoder, and the prompt of the decoder.

    Args:
        prompt: For the encoder alone, or for both.
        tokenize: Tokenizes one of the two.
        start_token_id: Token that the decoder's prompt begins with; None for a model without an encoder.

    Raises:
        ValueError: If it is no prompt, or does not fit the model.
    """
    if isinstance(prompt, dict) and prompt.keys() & _NAMES:
        if prompt.get("mm_processor_kwargs", 0) in (None, {}):  # vLLM's helpers add it
            prompt = {name: value for name, value in prompt.items() if name != "mm_processor_kwargs"}
        check(prompt.keys() == _NAMES, "prompt", prompt, f"a dict with the keys {sorted(_NAMES)} alone")
        if start_token_id is None:
            raise ArgumentError("prompt", prompt, "a prompt without encoder_prompt for this model")
        encoder = tokenize(prompt["encoder_prompt"])
        if prompt["decoder_prompt"] is None:
            return encoder, TokenizedPrompt(None, [start_token_id])
        decoder = tokenize(prompt["decoder_prompt"])
        if decoder.token_ids[0] != start_token_id:
            decoder.token_ids.insert(0, start_token_id)
        return encoder, decoder
    if start_token_id is None:
        return None, tokenize(prompt)
    return tokenize(prompt), TokenizedPrompt(None, [start_token_id])
