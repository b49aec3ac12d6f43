"""Messages of a chat with images in them, in the forms of OpenAI's API and of vLLM."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from jax_paged.config.engine_args import EngineConfig
from jax_paged.engine.features.multimodal.image_reader import image_of_url, is_data_url
from jax_paged.errors import check, check_int
from jax_paged.inputs import Prompt


class Conversation(NamedTuple):
    """A chat whose images are taken out.

    Args:
        messages: With {"type": "image"} in place of each of them.
        images: In order; a string is a URL, whose image is not decoded yet.
        domains: Hosts that images are fetched from.
    """

    messages: Sequence[dict[str, Any]]
    images: list[Any]
    domains: tuple[str, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether an image is not here yet, but at another host."""
        return any(map(_is_elsewhere, self.images))

    def fetched(self) -> Self:
        """Returns it with all images here; that takes as long as other hosts do.

        Raises:
            ValueError: As `prompt`.
        """
        images = [image_of_url(x, self.domains) if _is_elsewhere(x) else x for x in self.images]
        return self._replace(images=images)

    def prompt(self, token_ids: list[int]) -> Prompt:
        """Returns the prompt that the tokens of the messages and the images are; it may take a while.

        Raises:
            ValueError: If a URL holds no image, or is not to be fetched, or can't be.
        """
        if not self.images:
            return token_ids
        images = [
            image_of_url(image, self.domains) if isinstance(image, str) else image for image in self.images
        ]
        return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}}


def conversation(
    messages: Sequence[dict[str, Any]], config: EngineConfig, *, urls_only: bool = False
) -> Conversation:
    """Takes the images out of the messages of a chat; it takes no time.

    Args:
        messages: As users pass them; parts of their content may be {"type": "image_url", "image_url": {"url":
            ...}}, {"type": "image", "image": ...} or {"type": "image_pil", "image_pil": ...}.
        config: Says whether there may be images, and how many. Those of a model without are left in their
            place, for the tokenizer to refuse them.
        urls_only: Whether images come as image_url alone: the messages are JSON, which holds no images of
            Pillow's and no arrays.

    Raises:
        ValueError: If there are too many, or if one has another form.
    """
    if config.images is None:
        for i, message in enumerate(messages):
            # A tokenizer takes it for an image that was taken out.
            content = message.get("content") if isinstance(message, dict) else None
            ok = not isinstance(content, list) or {"type": "image"} not in content
            check(ok, f"messages[{i}].content", content, "text because the model reads no images")
        return Conversation(messages, [])
    images: list[Any] = []
    out = [
        _without_images(f"messages[{i}].content", message, images, urls_only)
        for i, message in enumerate(messages)
    ]
    check_int("messages", len(images), 0, config.images.max_images, aspect="the number of images in")
    return Conversation(out, images, config.images.domains)


def _is_elsewhere(image: Any) -> bool:
    return isinstance(image, str) and not is_data_url(image)


def _without_images(name: str, message: Any, images: list[Any], urls_only: bool) -> Any:
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
    if urls_only:
        form = '{"type": "image_url", "image_url": {"url": "data:image/...;base64,..."}}'
        check(
            kind == "image_url",
            name,
            kind,
            f"'image_url', in the form {form}",
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
