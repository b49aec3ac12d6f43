"""Conversion of images into the tiles or patches that a model reads, and into placeholder tokens.

Images are cut by the model's image processor from transformers, which needs Pillow but not torch. The
placeholder tokens are generated here: in transformers this is done by a class that also requires a video
processor, which needs torch.
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
from jax_paged.core.request import PlaceholderData
from jax_paged.engine.features.multimodal.image_fetch import fetch
from jax_paged.engine.prompt_reader import TokenizedPrompt
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import ArgumentError, check, check_int
from jax_paged.models.image_inputs import MAX_PATCHES, ImageSpec, Patches, PatchSpec, Tile

if TYPE_CHECKING:
    from PIL.Image import Image

# Maximum number of pixels of an image. A small file may claim billions of pixels, so the number is checked
# before the image is decoded.
MAX_PIXELS = 2**25
# Maximum number of scans of a JPEG. Encoders write about ten. A malicious file may contain many scans of a
# few bytes each, and the decoder passes over all pixels for each of them.
MAX_SCANS = 100
# JPEG markers that start a segment with a length field or end the image. All other markers have no data or
# are invalid, and libjpeg continues directly after them.
_JPEG_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")
# Only these decoders are enabled, to keep the attack surface small.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_START, _GLOBAL, _IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"


class ImageReader:
    """Reader of the images in prompts, as tiles (Idefics3, SmolVLM) or patches (Qwen3-VL). Thread-safe.

    Args:
        settings: The image format of the model, and the limits.
        tokenizer: The model's tokenizer, whose folder also contains preprocessor_config.json. None if prompts
            are token ids only; they can't contain images then.
    """

    def __init__(self, settings: ImageSettings, tokenizer: Tokenizer | None) -> None:
        self._settings, self._tokenizer = settings, tokenizer

    def read_prompt(self, prompt: Any, tokenize: Callable[[Any], TokenizedPrompt]) -> TokenizedPrompt:
        """Returns a tokenized prompt in which each image has its final number of placeholder tokens.

        Args:
            prompt: A prompt, in any form.
            tokenize: Tokenizes a prompt without images.
        """
        given = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
        if given:
            prompt = {name: value for name, value in prompt.items() if name != "multi_modal_data"}
        read = tokenize(prompt)
        token_ids, placeholder_data = self.read(read.token_ids, given or {})
        return dataclasses.replace(read, token_ids=token_ids, placeholder_data=placeholder_data)

    def read(self, token_ids: list[int], data: Any) -> tuple[list[int], tuple[PlaceholderData, ...]]:
        """Expands the image placeholders of a prompt, and cuts its images.

        Args:
            token_ids: The prompt, with one placeholder token per image.
            data: {"image": an image or a list of images}, each a Pillow image or uint8 [height, width, 3];
                may be empty.

        Returns:
            The prompt with one placeholder token per image vector, and the image data that these tokens stand
            for.

        Raises:
            ValueError: If there are too many images, the numbers of images and placeholders differ, or an
                image can't be read.
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
        allowed = f"{num}, the number of image placeholders in the prompt"
        check(num == len(images), "multi_modal_data", len(images), allowed, aspect=aspect)
        if not images:
            return token_ids, ()
        if self._tokenizer is None:
            raise ArgumentError("multi_modal_data", data, "None because the engine has no tokenizer")
        out: list[int] = []
        placeholder_data: list[PlaceholderData] = []
        rest = iter(images)
        for token_id in token_ids:
            if token_id != spec.token_id:
                out.append(token_id)
                continue
            image, first = as_image(next(rest)), len(out)
            if isinstance(spec, PatchSpec):
                patches = self._patches(image, spec)
                out += [token_id] * (patches.grid[0] * patches.grid[1])
                # The grid is hashed, too: images with other rows and columns may have patches with the same
                # bytes.
                digest = hashlib.sha256(f"{patches.grid}".encode() + patches.pixels.data).hexdigest()
                placeholder_data.append(PlaceholderData(first, len(out), digest, patches))
                continue
            tiles, text = self._tiles(image, spec)
            out += self._tokenizer.encode(text, add_special_tokens=False)
            placeholder_data += self._tile_placeholders(tiles, out, first, spec)
        return out, tuple(placeholder_data)

    def _patches(self, image: "Image", spec: PatchSpec) -> Patches:
        """Resizes an image as preprocessor_config.json defines, and cuts it into patches."""
        processor = self._processor
        for name in ("patch_size", "merge_size"):
            value, size = getattr(processor, name, None), getattr(spec, name)
            check(value == size, f"preprocessor_config.json: {name}", value, f"{size}, as in config.json")
        # Without this check, small images would be enlarged to min_pixels although that exceeds max_pixels.
        low, high = processor.size["shortest_edge"], processor.size["longest_edge"]
        check(low <= high, "min_pixels", low, f"at most max_pixels, which is {high}")
        try:
            num_patches = processor.get_number_of_image_patches(image.height, image.width)
        except Exception as error:  # for example, because of an extreme aspect ratio
            raise ValueError(f"an image of {image.size} pixels can't be read: {error}") from error
        aspect = "the number of patches of an"
        check(num_patches <= MAX_PATCHES, "image", num_patches, f"at most {MAX_PATCHES}", aspect=aspect)
        # One frame is enough: the model repeats a still image for all frames of a patch.
        pixels, cut = self._cut(image, temporal_patch_size=1)
        _, *grid = cut["image_grid_thw"][0].tolist()
        assert pixels.shape == (grid[0] * grid[1], 3 * spec.patch_size**2), "patches do not fill the grid"
        num_rows, num_columns = (num // spec.merge_size for num in grid)
        scale, offset = self._scaling()
        return Patches(pixels.astype(np.uint8), scale, offset, (num_rows, num_columns))

    def _cut(self, image: "Image", **options: Any) -> tuple[np.ndarray, Any]:
        """Runs the image processor; returns the pixels (0 to 255) and the processor's whole output."""
        try:
            cut = self._processor([image], do_rescale=False, do_normalize=False, **options)
            return np.asarray(cut["pixel_values"]), cut
        except Exception as error:  # image sizes that the processor can't cut
            raise ValueError(f"an image of {image.size} pixels can't be read: {error}") from error

    def _scaling(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns scale and offset of each channel, such that the encoder reads pixels * scale + offset."""
        processor = self._processor
        factor = np.float32(processor.rescale_factor if processor.do_rescale else 1.0)
        scale, offset = np.full(3, factor, np.float32), np.zeros(3, np.float32)
        if processor.do_normalize:
            std = np.asarray(processor.image_std, np.float32)
            scale, offset = scale / std, -np.asarray(processor.image_mean, np.float32) / std
        return scale, offset

    def _tiles(self, image: "Image", spec: ImageSpec) -> tuple[list[Tile], str]:
        """Returns the tiles of an image, and the text that stands for them in the prompt."""
        size = spec.tile_size
        (pixels,), cut = self._cut(image, return_row_col_info=True)
        ok = pixels.dtype == np.uint8 and pixels.shape[1:] == (3, size, size)
        shown = f"{pixels.dtype} {pixels.shape[1:]}"
        aspect = "the tiles that it cuts images into with"
        check(ok, "preprocessor_config.json", Text(shown), f"uint8 (3, {size}, {size})", aspect=aspect)
        text = _text(int(cut["rows"][0][0]), int(cut["cols"][0][0]), spec.num_tokens)
        scale, offset = self._scaling()
        return [Tile(np.ascontiguousarray(part), scale, offset) for part in pixels], text

    def _tile_placeholders(
        self, tiles: list[Tile], token_ids: list[int], first: int, spec: ImageSpec
    ) -> list[PlaceholderData]:
        """Assigns each tile to its run of placeholder tokens.

        Args:
            tiles: The tiles of an image.
            token_ids: The prompt, up to the end of this image.
            first: Position of the image's first token.
            spec: The image format of the model.
        """
        runs = []
        for is_image, run in itertools.groupby(
            range(first, len(token_ids)), lambda i: token_ids[i] == spec.token_id
        ):
            if is_image:
                positions = list(run)
                runs.append((positions[0], positions[-1] + 1))
        ok = [stop - start for start, stop in runs] == [spec.num_tokens] * len(tiles)
        assert self._tokenizer is not None, "tiles have tokens although there is no tokenizer"
        allowed = f"a tokenizer in which {_IMAGE} is token {spec.token_id}"
        check(ok, "tokenizer", self._tokenizer.name, allowed)
        digests = (hashlib.sha256(tile.pixels.data).hexdigest() for tile in tiles)
        rows = zip(runs, digests, tiles, strict=True)
        return [PlaceholderData(start, stop, digest, tile) for (start, stop), digest, tile in rows]

    @functools.cached_property
    def _processor(self) -> Any:
        """The model's image processor. Its first use imports transformers, which takes about a second."""
        _pillow()
        # Silences the advice to install torch.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoImageProcessor

        assert self._tokenizer is not None, "the image processor is used without a tokenizer"
        folder = self._tokenizer.name
        try:
            options: Any = {"backend": "pil", "trust_remote_code": False, **self._settings.processor}
            return AutoImageProcessor.from_pretrained(folder, **options)
        except Exception as error:
            raise ValueError(f"the image processor of {folder!r} can't be loaded: {error}") from error


def _text(num_rows: int, num_columns: int, num_tokens: int) -> str:
    """Returns the text that stands for an image: its tiles, row by row, then the image as a whole.

    An image of a single tile has only the part for the whole image.
    """
    tile = _IMAGE * num_tokens
    rows = [
        "".join(f"{_START}<row_{r}_col_{c}>{tile}" for c in range(1, num_columns + 1)) + "\n"
        for r in range(1, num_rows + 1)
    ]
    whole = f"{_START}{_GLOBAL}{tile}{_START}"
    return "".join(rows) + "\n" + whole if rows else whole


def as_image(given: Any) -> "Image":
    """Returns a Pillow image in RGB, on a white background, rotated as its EXIF data specify.

    Args:
        given: A Pillow image or an array, uint8 [height, width, 3].

    Raises:
        ValueError: If `given` is neither of these, is too large, or can't be decoded.
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

        with contextlib.suppress(Exception):  # unreadable EXIF data are ignored
            given = ImageOps.exif_transpose(given)
        return _in_rgb(given)
    except Exception as error:  # decoders raise many types of errors
        raise ValueError(f"an image can't be decoded: {_shown(error)}") from error


def image_of_url(url: str, domains: Collection[str] = ()) -> "Image":
    """Returns the image of a data URL or of an http(s) URL. Its pixels are decoded on first access.

    Args:
        url: A data:, http: or https: URL.
        domains: Hosts that images may be fetched from.

    Raises:
        ValueError: If the URL is not allowed, can't be fetched, or does not contain an image.
    """
    pillow = _pillow()
    head = url.partition(",")[0].strip().lower()
    is_image = head.startswith("data:image/") and head.rpartition(";")[2].strip() == "base64"
    content = _data_of(url) if is_image else fetch(url, domains)
    num_scans = num_jpeg_scans(content)
    check_int("image_url.url", num_scans, 0, MAX_SCANS, aspect="the number of scans of the JPEG in")
    try:
        return pillow.open(io.BytesIO(content), formats=_FORMATS)
    except Exception as error:  # decoders raise many types of errors
        allowed = f"the URL of an image in one of the formats {', '.join(_FORMATS)} ({_shown(error)})"
        raise ArgumentError("image_url.url", url, allowed) from error


def is_data_url(url: str) -> bool:
    """Returns whether a URL is a data URL. Upper and lower case of the scheme are equivalent."""
    return url[:32].lstrip()[:5].lower() == "data:"


def num_jpeg_scans(file: bytes) -> int:
    """Returns the number of scans that a decoder makes of a JPEG; 0 for other files.

    Scans of embedded thumbnails and of data after the image, such as a video, are not decoded and not
    counted. Markers are found in the same way as by libjpeg, so that a file can't hide scans from this count.
    """
    if not file.startswith(b"\xff\xd8"):
        return 0
    num_scans, i = 0, 2
    while found := _JPEG_MARKER.search(file, i):
        marker = found[1]
        if marker == b"\xd9":  # end of the image
            break
        num_scans += marker == b"\xda"
        i = found.end() + max(2, int.from_bytes(file[found.end() : found.end() + 2], "big"))
    return num_scans


def _data_of(url: str) -> bytes:
    """Returns the content of a data URL. Like browsers, ignores whitespace and missing padding."""
    body = url.partition(",")[2]
    digits = "".join(urllib.parse.unquote(body).split()).rstrip("=")
    try:
        return base64.b64decode(digits + "=" * (-len(digits) % 4), validate=True)
    except ValueError as error:
        raise ArgumentError("image_url.url", url, f"base64 ({error})") from error


def _in_rgb(image: "Image") -> "Image":
    """Converts an image of any Pillow mode to RGB, on a white background."""
    pillow = _pillow()
    if image.mode == "I" or image.mode.startswith("I;16"):
        return pillow.fromarray(_eight_bits(image)).convert("RGB")
    if image.mode == "La":  # Pillow converts this mode only to LA.
        image = image.convert("LA")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image).convert("RGB")


def _eight_bits(image: "Image") -> np.ndarray:
    """Converts a gray image with integer pixels to uint8 [height, width].

    Pillow would clip all values above 255. 16-bit images are scaled so that 65535 becomes white. An image of
    mode "I" may have 8 or 16 bits. If all its values are below 512, it is assumed to have 8 bits, because a
    16-bit image with these values would be almost black. An 8-bit image may have values slightly above 255 if
    it was resized.
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
    """Returns the message of a decoding error, without the objects that Pillow puts into it."""
    if type(error).__name__ == "UnidentifiedImageError":
        return "the content has another format"
    return str(error) or type(error).__name__


def _pillow() -> Any:
    """Imports and returns PIL.Image.

    Raises:
        ValueError: If Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("images need Pillow: pip install 'jax-paged[images]'") from error
    return Image
