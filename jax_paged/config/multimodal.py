"""How an engine reads images: how many of them a prompt may have, and what is kept of them."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

from jax_paged.arguments.suggestions import suggestions
from jax_paged.errors import check, check_int, check_number
from jax_paged.models.image_inputs import ImageSpec, PatchSpec

MAX_IMAGES = 8
# What may be said of how images are made smaller: of patches, and of tiles.
_PATCH_ARGS, _TILE_ARGS = ("min_pixels", "max_pixels"), ("size",)


class ImageArgs(Protocol):
    """The fields of EngineArgs that concern images."""

    @property
    def limit_mm_per_prompt(self) -> dict[str, int] | None: ...
    @property
    def mm_processor_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def allowed_media_domains(self) -> tuple[str, ...]: ...
    @property
    def encoder_cache_gb(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class ImageSettings:
    """How an engine reads images.

    Args:
        spec: How they stand in prompts.
        max_images: How many a prompt may have.
        cache_bytes: Host memory for what the encoder has made of the latest ones.
        domains: Hosts that images are fetched from.
        processor: What takes the place of values in preprocessor_config.json.
    """

    spec: ImageSpec | PatchSpec
    max_images: int
    cache_bytes: int
    domains: tuple[str, ...] = ()
    processor: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, args: ImageArgs, spec: ImageSpec | PatchSpec) -> "ImageSettings":
        """Returns what the arguments say, which note_image_problems has found no problem with.

        Raises:
            ValueError: If mm_processor_kwargs are those of another model.
        """
        given = args.mm_processor_kwargs or {}
        names = _PATCH_ARGS if isinstance(spec, PatchSpec) else _TILE_ARGS
        allowed = f"a dict with {' and '.join(names)} alone for this model"
        check(given.keys() <= set(names), "mm_processor_kwargs", given, allowed)
        limit, cache_bytes = max_images(args.limit_mm_per_prompt), int(args.encoder_cache_gb * 2**30)
        domains = tuple(domain.lower() for domain in args.allowed_media_domains)
        return cls(spec, limit, cache_bytes, domains, given)


def note_image_problems(args: ImageArgs, note: Callable[..., Any]) -> None:
    """Notes what is wrong with the arguments that have to do with images."""
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
    """Returns how many images a prompt may have, of EngineArgs.limit_mm_per_prompt.

    Raises:
        ValueError: If it is neither None nor a dict with a number of images.
    """
    if limit is None:
        return MAX_IMAGES
    check(isinstance(limit, dict), "limit_mm_per_prompt", limit, 'None or a dict such as {"image": 8}')
    # Scripts for several models name what this engine has none of.
    value = limit.get("image", MAX_IMAGES)
    check_int("limit_mm_per_prompt['image']", value, 0)
    return value


def _check_processor(given: Any) -> None:
    """Raises ValueError unless it is what EngineArgs.mm_processor_kwargs may be."""
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
