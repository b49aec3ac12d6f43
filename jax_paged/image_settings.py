"""How an engine reads images: how many of them a prompt may have, and what is kept of them."""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jax_paged.checks import check, check_int, check_number
from jax_paged.models.images import ImageSpec, PatchSpec

if TYPE_CHECKING:
    from jax_paged.config import EngineArgs

MAX_IMAGES = 8


@dataclasses.dataclass(frozen=True)
class ImageSettings:
    """How an engine reads images.

    Args:
        spec: How they stand in prompts.
        max_images: How many a prompt may have.
        cache_bytes: Host memory for what the encoder has made of the latest ones.
        domains: Hosts that images are fetched from.
    """

    spec: ImageSpec | PatchSpec
    max_images: int
    cache_bytes: int
    domains: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: "EngineArgs", spec: ImageSpec | PatchSpec) -> "ImageSettings":
        """Returns what the arguments say, which note_image_problems has found no problem with."""
        limit, cache_bytes = max_images(args.limit_mm_per_prompt), int(args.encoder_cache_gb * 2**30)
        domains = tuple(domain.lower() for domain in args.allowed_media_domains)
        return cls(spec, limit, cache_bytes, domains)


def note_image_problems(args: "EngineArgs", note: Callable[..., Any]) -> None:
    """Notes what is wrong with the arguments that have to do with images."""
    note(max_images, args.limit_mm_per_prompt)
    note(check_number, "encoder_cache_gb", args.encoder_cache_gb, 0, math.inf)
    given = args.allowed_media_domains
    ok = isinstance(given, list | tuple) and all(
        isinstance(domain, str) and domain and not set(domain) & set("/@ ") and domain.count(":") != 1
        for domain in given
    )
    allowed = "a list of hosts without a scheme, a port or a path, like ['images.example.org']"
    note(check, ok, "allowed_media_domains", given, allowed)


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
