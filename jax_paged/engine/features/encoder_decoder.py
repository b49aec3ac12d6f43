"""Prompts of encoder-decoder models."""

from collections.abc import Callable
from typing import Any

from jax_paged.engine.prompt_reader import TokenizedPrompt
from jax_paged.errors import ArgumentError, check

_NAMES = {"encoder_prompt", "decoder_prompt"}


def read_encoder_decoder_prompt(
    prompt: Any, tokenize: Callable[[Any], TokenizedPrompt], start_token_id: int | None
) -> tuple[TokenizedPrompt | None, TokenizedPrompt]:
    """Returns the prompt of the encoder (None for a decoder-only model) and the prompt of the decoder.

    Args:
        prompt: A prompt for the encoder alone, or a dict with "encoder_prompt" and "decoder_prompt".
        tokenize: Tokenizes one of the two prompts.
        start_token_id: First token of every decoder prompt; None for a decoder-only model.

    Raises:
        ValueError: If the prompt is malformed or does not fit the model.
    """
    if isinstance(prompt, dict) and prompt.keys() & _NAMES:
        if prompt.get("mm_processor_kwargs", 0) in (None, {}):  # vLLM's helper functions add this key
            prompt = {name: value for name, value in prompt.items() if name != "mm_processor_kwargs"}
        check(prompt.keys() == _NAMES, "prompt", prompt, f"a dict with exactly the keys {sorted(_NAMES)}")
        if start_token_id is None:
            raise ArgumentError("prompt", prompt, "a prompt for a decoder-only model (no encoder_prompt)")
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
