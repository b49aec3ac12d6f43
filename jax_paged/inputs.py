"""Types of prompts; the names are vLLM's."""

from collections.abc import Iterable
from typing import Any, NotRequired, TypedDict


class TokensPrompt(TypedDict):
    """A prompt as token ids.

    Example:
        >>> llm.generate({"prompt_token_ids": [1, 2, 3], "cache_salt": "user-7"})

    Args:
        prompt_token_ids: A list of integers or a NumPy array.
        prompt: The text of the prompt. It is copied to the output and not tokenized.
        cache_salt: Requests share cached prefixes only if their salts are equal.
        multi_modal_data: {"image": ...} with one image, or a list of images, for the placeholders among the
            tokens. An image is a Pillow image or a uint8 array [height, width, 3].
    """

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class TextPrompt(TypedDict):
    """A prompt as text.

    Args:
        prompt: The text.
        cache_salt: Requests share cached prefixes only if their salts are equal.
        multi_modal_data: Images, as in TokensPrompt.
    """

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]


class EmbedsPrompt(TypedDict):
    """A prompt as embedding vectors instead of tokens, for engines with enable_prompt_embeds.

    Args:
        prompt_embeds: Numbers [tokens, hidden_size], which replace the output of the model's token embedding.
        cache_salt: Requests share cached prefixes only if their salts are equal.
    """

    prompt_embeds: Any
    cache_salt: NotRequired[str]


SingletonPrompt = str | list[int] | TokensPrompt | TextPrompt | EmbedsPrompt


class ExplicitEncoderDecoderPrompt(TypedDict):
    """Separate prompts for the encoder and the decoder of an encoder-decoder model.

    Args:
        encoder_prompt: The prompt for the encoder.
        decoder_prompt: The prompt for the decoder. The decoder's start token is prepended unless the prompt
            already begins with it. None means the start token alone.
    """

    encoder_prompt: SingletonPrompt
    decoder_prompt: SingletonPrompt | None


Prompt = SingletonPrompt | ExplicitEncoderDecoderPrompt
type PromptType = Prompt  # the name in vLLM


def zip_enc_dec_prompts(
    enc_prompts: Iterable[SingletonPrompt], dec_prompts: Iterable[SingletonPrompt | None]
) -> list[ExplicitEncoderDecoderPrompt]:
    """Returns one encoder-decoder prompt per pair of prompts.

    Args:
        enc_prompts: Prompts for the encoder.
        dec_prompts: Prompts for the decoder. If one argument is longer, its remaining prompts are ignored.
    """
    pairs = zip(enc_prompts, dec_prompts, strict=False)
    return [{"encoder_prompt": encoder, "decoder_prompt": decoder} for encoder, decoder in pairs]
