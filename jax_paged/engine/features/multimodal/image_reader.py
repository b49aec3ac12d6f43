"""Images as users pass them -> the tiles or patches that a model reads, and placeholders that stand for them.

Images are cut by transformers' processor of the model, which needs Pillow and no torch. Placeholders are
written here, as transformers does that in a class that wants a processor of videos too, which needs torch.
"""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import os
import re
import urllib.parse
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_paged.arguments.shown_values import Text
from jax_paged.config.multimodal import ImageSettings
from jax_paged.core.request import StandIn
from jax_paged.engine.features.multimodal.image_fetch import fetched
from jax_paged.engine.prompt_reader import TokenizedPrompt
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import ArgumentError, check, check_int
from jax_paged.models.image_inputs import MAX_PATCHES, ImageSpec, Patches, PatchSpec, Tile

if TYPE_CHECKING:
    from PIL.Image import Image

# Pixels that an image may have. A small file may claim billions: it is refused before it is decoded.
MAX_PIXELS = 2**25
# Scans that a JPEG may have. Encoders write about ten; each may be a few bytes, and a pass over all pixels.
MAX_SCANS = 100
# Markers of a JPEG that begin a segment with its length, or end the picture. All others have no data, or are
# none: libjpeg goes on behind them.
_JPEG_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")
# A decoder that nobody needs is one that nobody attacks.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_START, _GLOBAL, _IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"


class ImageReader:
    """Reads the images of prompts, as tiles (Idefics3, SmolVLM) or patches (Qwen3-VL). Thread-safe.

    Args:
        settings: What the model reads, and the limits.
        tokenizer: Of the model, in whose folder preprocessor_config.json lies, too; None if prompts come as
            token ids only, which then have no images.
    """

    def __init__(self, settings: ImageSettings, tokenizer: Tokenizer | None) -> None:
        self._settings, self._tokenizer = settings, tokenizer

    def read_prompt(self, prompt: Any, tokenize: Callable[[Any], TokenizedPrompt]) -> TokenizedPrompt:
        """Returns a prompt whose placeholders have become those of its images.

        Args:
            prompt: In any form.
            tokenize: Tokenizes a prompt without images.
        """
        given = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
        if given:
            prompt = {name: value for name, value in prompt.items() if name != "multi_modal_data"}
        read = tokenize(prompt)
        token_ids, stand_ins = self.read(read.token_ids, given or {})
        return dataclasses.replace(read, token_ids=token_ids, stand_ins=stand_ins)

    def read(self, token_ids: list[int], data: Any) -> tuple[list[int], tuple[StandIn, ...]]:
        """Returns a prompt with its images.

        Args:
            token_ids: With one placeholder for each image.
            data: {"image": an image or a list of them}, each of Pillow's or uint8 [height, width, 3]; may be
                empty.

        Returns:
            The tokens, with as many placeholders as the images have vectors; and what these stand for.

        Raises:
            ValueError: If there are too many images, or others than placeholders, or if one can't be read.
        """
        ok, allowed = (
            isinstance(data, dict) and data.keys() <= {"image"},
            'a dict {"image": image or list of images}',
        )
        check(ok, "multi_modal_data", data, allowed)
        given = data.get("image")
        images = [] if given is None else given if isinstance(given, list | tuple) else [given]
        aspect = "the number of images in"
        check_int("multi_modal_data", len(images), 0, self._settings.max_images, aspect=aspect)
        spec = self._settings.spec
        num = token_ids.count(spec.token_id)
        allowed = f"{num}, the number of placeholders in the prompt"
        check(num == len(images), "multi_modal_data", len(images), allowed, aspect=aspect)
        if not images:
            return token_ids, ()
        if self._tokenizer is None:
            raise ArgumentError("multi_modal_data", data, "None because the engine has no tokenizer")
        out: list[int] = []
        stand_ins: list[StandIn] = []
        rest = iter(images)
        for token_id in token_ids:
            if token_id != spec.token_id:
                out.append(token_id)
                continue
            image, first = as_image(next(rest)), len(out)
            if isinstance(spec, PatchSpec):
                patches = self._patches(image, spec)
                out += [token_id] * (patches.grid[0] * patches.grid[1])
                # Equal bytes may be patches of images that have other rows and columns.
                digest = hashlib.sha256(f"{patches.grid}".encode() + patches.pixels.data).hexdigest()
                stand_ins.append(StandIn(first, len(out), digest, patches))
                continue
            tiles, text = self._tiles(image, spec)
            out += self._tokenizer.encode(text, add_special_tokens=False)
            stand_ins += self._stand_ins(tiles, out, first, spec)
        return out, tuple(stand_ins)

    def _patches(self, image: "Image", spec: PatchSpec) -> Patches:
        """Returns an image of a size that preprocessor_config.json allows, as patches."""
        processor = self._processor
        for name in ("patch_size", "merge_size"):
            value, size = getattr(processor, name, None), getattr(spec, name)
            check(value == size, f"preprocessor_config.json: {name}", value, f"{size}, as in config.json")
        # Else small images would be made larger than the largest that are not made smaller.
        low, high = processor.size["shortest_edge"], processor.size["longest_edge"]
        check(low <= high, "min_pixels", low, f"at most max_pixels, which is {high}")
        try:
            num_patches = processor.get_number_of_image_patches(image.height, image.width)
        except Exception as error:  # such as one that is far longer than it is wide
            raise ValueError(f"an image of {image.size} pixels can't be read: {error}") from error
        aspect = "the number of patches of an"
        check(num_patches <= MAX_PATCHES, "image", num_patches, f"at most {MAX_PATCHES}", aspect=aspect)
        # A still image is all frames of its patches.
        pixels, cut = self._cut(image, temporal_patch_size=1)
        _, *grid = cut["image_grid_thw"][0].tolist()
        assert pixels.shape == (grid[0] * grid[1], 3 * spec.patch_size**2), "patches fill rows and columns"
        num_rows, num_columns = (num // spec.merge_size for num in grid)
        scale, offset = self._scaling()
        return Patches(pixels.astype(np.uint8), scale, offset, (num_rows, num_columns))

    def _cut(self, image: "Image", **options: Any) -> tuple[np.ndarray, Any]:
        """Returns what the processor makes of an image: its pixels from 0 to 255, and all that it returns."""
        try:
            cut = self._processor([image], do_rescale=False, do_normalize=False, **options)
            return np.asarray(cut["pixel_values"]), cut
        except Exception as error:  # whatever sizes it can't cut
            raise ValueError(f"an image of {image.size} pixels can't be read: {error}") from error

    def _scaling(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the scale and the offset of each channel."""
        processor = self._processor
        factor = np.float32(processor.rescale_factor if processor.do_rescale else 1.0)
        scale, offset = np.full(3, factor, np.float32), np.zeros(3, np.float32)
        if processor.do_normalize:
            std = np.asarray(processor.image_std, np.float32)
            scale, offset = scale / std, -np.asarray(processor.image_mean, np.float32) / std
        return scale, offset

    def _tiles(self, image: "Image", spec: ImageSpec) -> tuple[list[Tile], str]:
        """Returns the parts of an image, and the text that stands for them."""
        size = spec.tile_size
        (pixels,), cut = self._cut(image, return_row_col_info=True)
        ok = pixels.dtype == np.uint8 and pixels.shape[1:] == (3, size, size)
        shown = f"{pixels.dtype} {pixels.shape[1:]}"
        aspect = "the tiles that it cuts images into with"
        check(ok, "preprocessor_config.json", Text(shown), f"uint8 (3, {size}, {size})", aspect=aspect)
        text = _text(int(cut["rows"][0][0]), int(cut["cols"][0][0]), spec.num_tokens)
        scale, offset = self._scaling()
        return [Tile(np.ascontiguousarray(part), scale, offset) for part in pixels], text

    def _stand_ins(
        self, tiles: list[Tile], token_ids: list[int], first: int, spec: ImageSpec
    ) -> list[StandIn]:
        """Returns what the placeholders from a position on stand for: each run of them for a tile."""
        runs = []
        for is_image, run in itertools.groupby(
            range(first, len(token_ids)), lambda i: token_ids[i] == spec.token_id
        ):
            if is_image:
                positions = list(run)
                runs.append((positions[0], positions[-1] + 1))
        ok = [stop - start for start, stop in runs] == [spec.num_tokens] * len(tiles)
        assert self._tokenizer is not None, "it has made these tokens"
        check(ok, "tokenizer", self._tokenizer.name, f"one that has {_IMAGE} as token {spec.token_id}")
        digests = (hashlib.sha256(tile.pixels.data).hexdigest() for tile in tiles)
        rows = zip(runs, digests, tiles, strict=True)
        return [StandIn(start, stop, digest, tile) for (start, stop), digest, tile in rows]

    @functools.cached_property
    def _processor(self) -> Any:
        """transformers' processor of the model; the first use imports transformers (about a second)."""
        _pillow()
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install torch
        from transformers import AutoImageProcessor

        assert self._tokenizer is not None, "it has read the prompt"
        folder = self._tokenizer.name
        try:
            options: Any = {"backend": "pil", "trust_remote_code": False, **self._settings.processor}
            return AutoImageProcessor.from_pretrained(folder, **options)
        except Exception as error:
            raise ValueError(f"the image processor of {folder!r} can't be loaded: {error}") from error


def _text(num_rows: int, num_columns: int, num_tokens: int) -> str:
    """Returns what stands for an image: its tiles, if it is cut into some, and the whole of it."""
    tile = _IMAGE * num_tokens
    rows = [
        "".join(f"{_START}<row_{r}_col_{c}>{tile}" for c in range(1, num_columns + 1)) + "\n"
        for r in range(1, num_rows + 1)
    ]
    whole = f"{_START}{_GLOBAL}{tile}{_START}"
    return "".join(rows) + "\n" + whole if rows else whole


def as_image(given: Any) -> "Image":
    """Returns an image of Pillow's in RGB, on white where it is transparent, turned as its EXIF data say.

    Args:
        given: Of Pillow's, or an array.

    Raises:
        ValueError: If it is neither, or too large, or can't be decoded.
    """
    pillow = _pillow()
    if isinstance(given, np.ndarray):
        ok = given.dtype == np.uint8 and given.ndim == 3 and given.shape[2] == 3 and given.size > 0
        shape = Text(f"{given.dtype} {list(given.shape)}")
        check(ok, "image", shape, "a non-empty array of uint8 [height, width, 3]")
        given = pillow.fromarray(given)
    if not isinstance(given, pillow.Image):
        allowed = "a Pillow image or an array of uint8 [height, width, 3]"
        raise ArgumentError("image", given, allowed)
    num_pixels = given.width * given.height
    check_int("image", num_pixels, 1, MAX_PIXELS, aspect="the number of pixels of an")
    try:
        from PIL import ImageOps

        with contextlib.suppress(Exception):  # data that can't be read say nothing
            given = ImageOps.exif_transpose(given)
        return _in_rgb(given)
    except Exception as error:  # decoders raise what they like
        raise ValueError(f"an image can't be decoded: {_shown(error)}") from error


def image_of_url(url: str, domains: Collection[str] = ()) -> "Image":
    """Returns the image in a data URL, or at a URL; its pixels are decoded when they are asked for.

    Args:
        url: With its data, or http: or https:.
        domains: Hosts that images are fetched from.

    Raises:
        ValueError: If it is a URL that is not to be fetched, or can't be, or holds no image.
    """
    pillow = _pillow()
    head = url.partition(",")[0].strip().lower()
    is_image = head.startswith("data:image/") and head.rpartition(";")[2].strip() == "base64"
    held = _data_of(url) if is_image else fetched(url, domains)
    num_scans = num_jpeg_scans(held)
    check_int("image_url.url", num_scans, 0, MAX_SCANS, aspect="the number of scans of the JPEG in")
    try:
        return pillow.open(io.BytesIO(held), formats=_FORMATS)
    except Exception as error:  # decoders raise what they like
        formats = ", ".join(_FORMATS)
        raise ArgumentError(
            "image_url.url", url, f"that of an image of {formats} ({_shown(error)})"
        ) from error


def is_data_url(url: str) -> bool:
    """Returns whether a URL holds its data; the case of a scheme means nothing."""
    return url[:32].lstrip()[:5].lower() == "data:"


def num_jpeg_scans(file: bytes) -> int:
    """Returns the number of scans that a decoder makes of a JPEG; 0 for other files.

    Thumbnails in its headers and whatever follows the picture, such as a video, are not decoded. Markers are
    found as libjpeg finds them, so that no file can hide scans from this count.
    """
    if not file.startswith(b"\xff\xd8"):
        return 0
    num_scans, i = 0, 2
    while found := _JPEG_MARKER.search(file, i):
        marker = found[1]
        if marker == b"\xd9":  # the end of the picture
            break
        num_scans += marker == b"\xda"
        i = found.end() + max(2, int.from_bytes(file[found.end() : found.end() + 2], "big"))
    return num_scans


def _data_of(url: str) -> bytes:
    """Returns what a data URL holds, read as browsers read it: white space and padding mean nothing."""
    body = url.partition(",")[2]
    digits = "".join(urllib.parse.unquote(body).split()).rstrip("=")
    try:
        return base64.b64decode(digits + "=" * (-len(digits) % 4), validate=True)
    except ValueError as error:
        raise ArgumentError("image_url.url", url, f"base64 ({error})") from error


def _in_rgb(image: "Image") -> "Image":
    """Returns an image of any of Pillow's modes in RGB, on white where it is transparent."""
    pillow = _pillow()
    if image.mode == "I" or image.mode.startswith("I;16"):
        return pillow.fromarray(_eight_bits(image)).convert("RGB")
    if image.mode == "La":  # Pillow converts it to LA alone
        image = image.convert("LA")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image).convert("RGB")


def _eight_bits(image: "Image") -> np.ndarray:
    """Returns a gray image of integers as uint8 [height, width]; Pillow would cut off all above 255.

    16 bits are scaled so that the largest value is white. Images of mode "I" may have either range: without a
    value above 511, as 16 bits they would be black, and are 8 bits that resizing may have overshot.
    """
    values = np.asarray(image)
    has_16_bits = image.mode != "I" or values.max() > 2 * 255 + 1
    if has_16_bits:
        gray = (np.clip(values, 0, 2**16 - 1).astype(np.int32) + 128) // 257
    else:
        gray = np.clip(values, 0, 255)
    if (transparent := image.info.get("transparency")) is not None:
        gray = np.where(values == transparent, 255, gray)
    return gray.astype(np.uint8)


def _shown(error: Exception) -> str:
    """Returns the message of a decoder, without the objects that it has read from."""
    if type(error).__name__ == "UnidentifiedImageError":
        return "its first bytes are those of none of them"
    return str(error) or type(error).__name__


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("images need Pillow: pip install 'jax-paged[images]'") from error
    return Image
