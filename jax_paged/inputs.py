"""Prompts as users pass them."""

from typing import Any, TypedDict

from jax_paged.checks import check


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class EncoderDecoderPrompt(TypedDict):
    """What an encoder reads, and what the decoder's output begins with; both as text or token ids."""

    encoder_prompt: str | list[int]
    decoder_prompt: str | list[int]


Prompt = str | list[int] | TokensPrompt | TextPrompt | EncoderDecoderPrompt


def as_prompts(prompts: Any) -> list[Prompt]:
    """Returns a list of prompts of what users pass: one prompt in any form, or a list of them.

    A list of integers is one prompt.
    """
    if isinstance(prompts, list | tuple) and not (prompts and isinstance(prompts[0], int)):
        return list(prompts)
    is_one = isinstance(prompts, str | dict | list | tuple)
    check(is_one, "prompts", prompts, "a prompt or a list of prompts")
    one: Any = prompts
    return [one]
