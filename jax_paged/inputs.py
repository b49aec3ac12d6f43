"""Prompts as users pass them; the names are vLLM's."""

from collections.abc import Iterable
from typing import Any, NotRequired, TypedDict


class TokensPrompt(TypedDict):
    """A prompt as token ids.

    Args:
        prompt_token_ids: A list of integers or a NumPy array.
        prompt: Its text, which outputs repeat; it is not tokenized.
        cache_salt: Only requests of equal salt share cached prefixes.
        multi_modal_data: {"image": an image or a list of them}, one for each placeholder among the tokens.
            Images are Pillow's, or arrays of uint8 [height, width, 3].
    """

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class TextPrompt(TypedDict):
    """A prompt as text.

    Args:
        prompt: The text.
        cache_salt: Only requests of equal salt share cached prefixes.
        multi_modal_data: As in TokensPrompt.
    """

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class EmbedsPrompt(TypedDict):
    """A prompt as vectors in place of tokens, for engines with enable_prompt_embeds.

    Args:
        prompt_embeds: An array of numbers, [tokens, hidden_size]: what the model's table of token embeddings
            would return.
        cache_salt: Only requests of equal salt share cached prefixes.
    """

    prompt_embeds: Any
    cache_salt: NotRequired[str]


SingletonPrompt = str | list[int] | TokensPrompt | TextPrompt | EmbedsPrompt


class ExplicitEncoderDecoderPrompt(TypedDict):
    """What an encoder reads, and what the decoder's output begins with.

    Args:
        encoder_prompt: For the encoder.
        decoder_prompt: For the decoder; its start token is prepended, unless the prompt begins with it. None
            takes the start token alone.
    """

    encoder_prompt: SingletonPrompt
    decoder_prompt: SingletonPrompt | None


Prompt = SingletonPrompt | ExplicitEncoderDecoderPrompt
type PromptType = Prompt  # vLLM's name


def zip_enc_dec_prompts(
    enc_prompts: Iterable[SingletonPrompt], dec_prompts: Iterable[SingletonPrompt | None]
) -> list[ExplicitEncoderDecoderPrompt]:
    """Returns one encoder-decoder prompt per pair of prompts; as many as the shorter argument has."""
    pairs = zip(enc_prompts, dec_prompts, strict=False)
    return [{"encoder_prompt": encoder, "decoder_prompt": decoder} for encoder, decoder in pairs]
