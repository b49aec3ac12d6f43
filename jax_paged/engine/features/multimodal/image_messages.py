"""Chat messages that contain images, in the formats of the OpenAI API and of vLLM."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from jax_paged.config.engine_config import EngineConfig
from jax_paged.engine.features.multimodal.image_reader import image_of_url, is_data_url
from jax_paged.errors import check, check_int
from jax_paged.inputs import Prompt


class Conversation(NamedTuple):
    """A chat whose images have been taken out of its messages.

    Args:
        messages: The messages, with {"type": "image"} in place of each image.
        images: The images, in order. A string is a URL whose image has not been fetched or decoded.
        domains: Hosts that images may be fetched from.
    """

    messages: Sequence[dict[str, Any]]
    images: list[Any]
    domains: tuple[str, ...] = ()

    @property
    def has_remote_images(self) -> bool:
        """True if an image has yet to be fetched from another host."""
        return any(map(_is_remote_url, self.images))

    def with_fetched_images(self) -> Self:
        """Returns the conversation with all remote images fetched. Blocks until the other hosts answer.

        Raises:
            ValueError: As for `prompt`.
        """
        images = [image_of_url(x, self.domains) if _is_remote_url(x) else x for x in self.images]
        return self._replace(images=images)

    def prompt(self, token_ids: list[int]) -> Prompt:
        """Returns the prompt of the conversation. May be slow: fetches and opens images that are still URLs.

        Args:
            token_ids: The tokens of the messages.

        Raises:
            ValueError: If a URL is not allowed, can't be fetched, or does not contain an image.
        """
        if not self.images:
            return token_ids
        images = [
            image_of_url(image, self.domains) if isinstance(image, str) else image for image in self.images
        ]
        return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}}


def extract_images(
    messages: Sequence[dict[str, Any]], config: EngineConfig, *, urls_only: bool = False
) -> Conversation:
    """Takes the images out of chat messages. This is fast: no image is fetched or decoded.

    Args:
        messages: Chat messages as users pass them. A content part with an image is {"type": "image_url",
            "image_url": {"url": ...}}, {"type": "image", "image": ...} or {"type": "image_pil", "image_pil":
            ...}.
        config: Engine configuration: whether the model reads images, and how many a prompt may have. If the
            model reads no images, they stay in the messages, and the tokenizer rejects them.
        urls_only: Whether only "image_url" parts are accepted. This is the case for JSON messages, which
            cannot contain Pillow images or arrays.

    Raises:
        ValueError: If there are too many images, or an image is malformed.
    """
    if config.images is None:
        for i, message in enumerate(messages):
            # The tokenizer would mistake this part for an image that was taken out.
            content = message.get("content") if isinstance(message, dict) else None
            ok = not isinstance(content, list) or {"type": "image"} not in content
            check(ok, f"messages[{i}].content", content, "text because the model does not support images")
        return Conversation(messages, [])
    images: list[Any] = []
    out = [
        _without_images(f"messages[{i}].content", message, images, urls_only)
        for i, message in enumerate(messages)
    ]
    check_int("messages", len(images), 0, config.images.max_images, aspect="the number of images in")
    return Conversation(out, images, config.images.domains)


def _is_remote_url(image: Any) -> bool:
    """Returns whether an image is a URL of another host."""
    return isinstance(image, str) and not is_data_url(image)


def _without_images(name: str, message: Any, images: list[Any], urls_only: bool) -> Any:
    """Returns a message with {"type": "image"} in place of each image, and appends the images to `images`."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "image", "image_pil"):
            images.append(_image(name, kind, part.get(kind), urls_only))
            part = {"type": "image"}
        parts.append(part)
    return {**message, "content": parts}


def _image(name: str, kind: str, given: Any, urls_only: bool) -> Any:
    """Returns the image or the URL of a content part.

    Args:
        name: Name of the message content, for error messages.
        kind: Type of the content part.
        given: Value of the content part.
        urls_only: As for `extract_images`.

    Raises:
        ValueError: If the part is malformed, or its type is not accepted.
    """
    if urls_only:
        form = '{"type": "image_url", "image_url": {"url": "data:image/...;base64,..."}}'
        check(
            kind == "image_url",
            name,
            kind,
            f"'image_url', as in {form}",
            aspect="the type of an image in",
        )
    if kind == "image_url":
        ok = isinstance(given, dict) and isinstance(given.get("url"), str)
        shown = type(given).__name__ if not isinstance(given, dict) else sorted(given)
        check(ok, f"{name}.image_url", shown, 'a dict {"url": "data:image/...;base64,..."}')
        return given["url"]
    ok, shown = given is not None and not isinstance(given, str), type(given).__name__
    check(ok, f"{name}.{kind}", shown, "a Pillow image or an array of uint8 [height, width, 3]")
    return given
