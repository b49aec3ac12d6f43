"""How an engine reads images: how many of them a prompt may have, and what is kept of them."""

import dataclasses
from typing import Any

from jax_paged.checks import check, check_int
from jax_paged.models.images import ImageSpec, PatchSpec

MAX_IMAGES = 8


@dataclasses.dataclass(frozen=True)
class ImageSettings:
    """How an engine reads images.

    Args:
        spec: How they stand in prompts.
        max_images: How many a prompt may have.
        cache_bytes: Host memory for what the encoder has made of the latest ones.
    """

    spec: ImageSpec | PatchSpec
    max_images: int
    cache_bytes: int


def max_images(limit: Any) -> int:
    """Returns how many images a prompt may have, of EngineArgs.limit_mm_per_prompt.

    Raises:
        ValueError: If it is neither None nor a dict with a number of images.
    """
    if limit is None:
        return MAX_IMAGES
    check(isinstance(limit, dict), "limit_mm_per_prompt", limit, 'None or a dict like {"image": 8}')
    # Scripts for several models name what this engine has none of.
    value = limit.get("image", MAX_IMAGES)
    check_int("limit_mm_per_prompt['image']", value, 0)
    return value
