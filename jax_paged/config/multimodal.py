"""Settings for image inputs of an engine."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

from jax_paged.arguments.suggestions import suggestions
from jax_paged.errors import check, check_int, check_number
from jax_paged.models.image_inputs import ImageSpec, PatchSpec

MAX_IMAGES = 8
# Allowed keys of mm_processor_kwargs for models that cut images into patches, and into tiles.
_PATCH_ARGS, _TILE_ARGS = ("min_pixels", "max_pixels"), ("size",)


class ImageArgs(Protocol):
    """The fields of EngineArgs for images."""

    @property
    def limit_mm_per_prompt(self) -> dict[str, int] | None:
        """Maximum number of images in a prompt."""
        ...

    @property
    def mm_processor_kwargs(self) -> dict[str, Any] | None:
        """Limits on the size that images are scaled to."""
        ...

    @property
    def allowed_media_domains(self) -> tuple[str, ...]:
        """Hosts from which images may be fetched."""
        ...

    @property
    def encoder_cache_gb(self) -> float:
        """Host memory for the embedding vectors of images (GiB)."""
        ...


@dataclasses.dataclass(frozen=True)
class ImageSettings:
    """Settings for image inputs, resolved against the model.

    Args:
        spec: How images appear in the prompts of the model.
        max_images: Maximum number of images in a prompt.
        cache_bytes: Host memory for the encoder's outputs for the most recently used images (bytes).
        domains: Hosts from which images may be fetched, in lower case.
        processor: Fields that replace fields of preprocessor_config.json.
    """

    spec: ImageSpec | PatchSpec
    max_images: int
    cache_bytes: int
    domains: tuple[str, ...] = ()
    processor: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, args: ImageArgs, spec: ImageSpec | PatchSpec) -> "ImageSettings":
        """Creates the settings from arguments that `check_image_args` has accepted.

        Args:
            args: The arguments.
            spec: How images appear in the prompts of the model.

        Raises:
            ValueError: If mm_processor_kwargs has keys that this model does not support.
        """
        given = args.mm_processor_kwargs or {}
        names = _PATCH_ARGS if isinstance(spec, PatchSpec) else _TILE_ARGS
        allowed = f"a dict with some of the keys {', '.join(names)} for this model"
        check(given.keys() <= set(names), "mm_processor_kwargs", given, allowed)
        limit, cache_bytes = max_images(args.limit_mm_per_prompt), int(args.encoder_cache_gb * 2**30)
        domains = tuple(domain.lower() for domain in args.allowed_media_domains)
        return cls(spec, limit, cache_bytes, domains, given)


def check_image_args(args: ImageArgs, note: Callable[..., Any]) -> None:
    """Checks the arguments for images.

    Args:
        args: The arguments.
        note: Calls a check with arguments and stores its error, as Problems.note does.
    """
    note(max_images, args.limit_mm_per_prompt)
    note(check_number, "encoder_cache_gb", args.encoder_cache_gb, 0, math.inf)
    note(_check_processor, args.mm_processor_kwargs)
    given = args.allowed_media_domains
    ok = isinstance(given, list | tuple) and all(
        isinstance(domain, str) and domain and not set(domain) & set("/@ ") and domain.count(":") != 1
        for domain in given
    )
    allowed = "a list of hosts without a scheme, a port or a path, such as ['images.example.org']"
    note(check, ok, "allowed_media_domains", given, allowed)


def max_images(limit: Any) -> int:
    """Returns the maximum number of images in a prompt.

    Args:
        limit: Value of EngineArgs.limit_mm_per_prompt.

    Raises:
        ValueError: If it is neither None nor a dict with a valid number of images.
    """
    if limit is None:
        return MAX_IMAGES
    check(isinstance(limit, dict), "limit_mm_per_prompt", limit, 'None or a dict such as {"image": 8}')
    # Other keys, such as "video", are ignored because scripts for several models set them.
    value = limit.get("image", MAX_IMAGES)
    check_int("limit_mm_per_prompt['image']", value, 0)
    return value


def _check_processor(given: Any) -> None:
    """Raises ValueError if the value is not allowed for EngineArgs.mm_processor_kwargs."""
    names = {*_PATCH_ARGS, *_TILE_ARGS}
    ok = given is None or (isinstance(given, dict) and given.keys() <= names)
    close = suggestions(given, names) if isinstance(given, dict) else ""
    allowed = f"None or a dict with some of the keys {', '.join(sorted(names))}"
    check(ok, "mm_processor_kwargs", given, allowed, remedy=close)
    for name, value in (given or {}).items():
        shown = f"mm_processor_kwargs[{name!r}]"
        if name in _TILE_ARGS:
            ok = isinstance(value, dict) and value.keys() == {"longest_edge"}
            check(ok, shown, value, 'a dict {"longest_edge": pixels}')
            value = value["longest_edge"]
        check_int(shown, value, 1)
