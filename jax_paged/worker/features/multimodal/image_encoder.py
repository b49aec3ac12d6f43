"""Image encoder: runs before the first step that needs an image, and caches the resulting vectors."""

import collections
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jax_paged.config.engine_args import EngineArgs
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.errors import check
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.checkpoint import read_config, resolve_model_dir
from jax_paged.models.image_inputs import MAX_PATCHES, ImageSpec, Patches, PatchSpec, Tile
from jax_paged.models.registry import IMAGE_MODELS, get_architecture
from jax_paged.models.weights import LoadedModel
from jax_paged.worker.compilation.programs import Program, TraceContext
from jax_paged.worker.input_batch import InputBatch

_LOGGER = logging.getLogger(__name__)

# Batch sizes of the programs that encode tiles.
NUM_TILES = (1, 4)
# Size of the smallest program that encodes patches. Sizes double from there. Each is rounded up to a multiple
# of the patches per token.
MIN_PATCHES = 256
# Maximum length of an encoding error in a request's error message (characters). XLA may list all buffers.
_MAX_ERROR = 300


@dataclasses.dataclass(frozen=True)
class EncodeImagesProgram(Program):
    """Program that encodes tiles with the model's `encode_images`; returns float32 [tiles, tokens, E].

    Args:
        num_tiles: Number of tiles.
    """

    num_tiles: int

    def __str__(self) -> str:
        return f"images {self.num_tiles}"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""
        spec, n = context.features.image_spec, self.num_tiles
        assert isinstance(spec, ImageSpec), "the model does not cut images into tiles"

        def encode(
            weights: list[Array], tiles: UInt8[Array, "b 3 s s"], scale: Array, offset: Array
        ) -> Float[Array, "b n e"]:
            model: Any = context.merge(weights)
            return model.encode_images(tiles, scale, offset).astype(jnp.float32)

        channels = context.shape((n, 3), jnp.float32)
        tiles = context.shape((n, 3, spec.tile_size, spec.tile_size), jnp.uint8)
        jitted = jax.jit(encode, out_shardings=context.replicated)
        return jitted.trace(context.weights, tiles, channels, channels)


@dataclasses.dataclass(frozen=True)
class EncodePatchesProgram(Program):
    """Program that encodes one image with the model's `encode_images`; returns float32 [tokens, numbers].

    Args:
        num_patches: Maximum number of patches of the image.
    """

    num_patches: int

    def __str__(self) -> str:
        return f"image of {self.num_patches}"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""
        spec = context.features.image_spec
        assert isinstance(spec, PatchSpec), "the model does not cut images into patches"

        def encode(weights: list[Array], *image: Array) -> Float[Array, "m v"]:
            model: Any = context.merge(weights)
            return model.encode_images(*image).astype(jnp.float32)

        patches = context.shape((self.num_patches, 3 * spec.patch_size**2), jnp.uint8)
        channels, grid = context.shape((3,), jnp.float32), context.shape((2,), jnp.int32)
        jitted = jax.jit(encode, out_shardings=context.replicated)
        return jitted.trace(context.weights, patches, channels, channels, grid)


def plan_images(spec: ImageSpec | PatchSpec, max_model_len: int) -> list[Program]:
    """Returns the programs that encode images, in ascending order of size.

    Args:
        spec: Image format of the model.
        max_model_len: Maximum tokens of a prompt.
    """
    if isinstance(spec, ImageSpec):
        return [EncodeImagesProgram(n) for n in NUM_TILES]
    square = spec.merge_size**2
    most = min(MAX_PATCHES, max_model_len * square)
    num_sizes = 1 + (-(-most // MIN_PATCHES) - 1).bit_length()
    sizes = (_padded_size(MIN_PATCHES << i, square) for i in range(num_sizes))
    return [EncodePatchesProgram(size) for size in dict.fromkeys(sizes)]


def check_images(args: EngineArgs, loaded: LoadedModel | LanguageModel | None) -> None:
    """Checks arguments that are only allowed with, or without, a model that reads images; reads no weights.

    Args:
        args: Engine arguments.
        loaded: A model in memory that replaces args.model; None for args.model.

    Raises:
        ValueError: If an argument is not allowed.
    """
    if loaded is None:
        config = read_config(resolve_model_dir(args.model), args.hf_overrides or {})
        name = get_architecture(config)
    else:
        name = type(loaded.model if isinstance(loaded, LoadedModel) else loaded).__name__
    if name not in IMAGE_MODELS:
        given, allowed = args.mm_processor_kwargs, f"None because {name} does not accept images"
        check(not given, "mm_processor_kwargs", given, allowed)
        return
    condition = f"with {name}, which accepts images"
    for setting, only in (
        ("enable_lora", False),
        ("pipeline_parallel_size", 1),
        ("distributed_executor_backend", "uni"),
    ):
        check(getattr(args, setting) == only, setting, getattr(args, setting), f"{only!r} {condition}")


def check_images_can_be_encoded(spec: ImageSpec | PatchSpec, context: TraceContext) -> None:
    """Traces the smallest program that encodes images, without running it.

    Raises:
        ValueError: If the shapes in the model's configuration are inconsistent.
    """
    program = plan_images(spec, context.max_model_len)[0]
    try:
        program.trace(context)
    except Exception as error:  # any layer may raise an error
        raise ValueError(
            f"the model can't encode images: {_shortened(error)}. Check vision_config of its config.json"
        ) from error


def _padded_size(num_patches: int, square: int) -> int:
    """Returns the number of patches of the smallest program that can encode an image.

    Args:
        num_patches: Patches of the image.
        square: Patches per token. The size of every program is a multiple of this.
    """
    size = max(MIN_PATCHES, 1 << (num_patches - 1).bit_length())
    return -(-size // square) * square


def _encode_patches(
    run: Callable[..., Any], weights: list[Array], image: Patches
) -> Float[np.ndarray, "n e"]:
    """Encodes an image that is cut into patches; returns one vector per token."""
    n, num_tokens = len(image.pixels), image.grid[0] * image.grid[1]
    pixels = np.pad(image.pixels, ((0, _padded_size(n, n // num_tokens) - n), (0, 0)))
    args = pixels, image.scale, image.offset, np.array(image.grid, np.int32)
    out = np.asarray(run(EncodePatchesProgram(len(pixels)), weights, *args))
    return out[:num_tokens].copy()


def _shortened(error: Exception) -> str:
    """Returns the message of an error, shortened if it is long."""
    text = str(error) or repr(error)
    return text if len(text) <= _MAX_ERROR else f"{text[:_MAX_ERROR]}..."


class ImageEncoder:
    """Encoder of the images that a step needs, with a least-recently-used cache of their vectors.

    Args:
        max_bytes: Maximum size of the cached vectors (bytes).
        batch_invariant: Whether the vectors of a tile must not depend on the number of tiles encoded with it.
    """

    def __init__(self, max_bytes: int, *, batch_invariant: bool = False) -> None:
        self._sizes = NUM_TILES[-1:] if batch_invariant else NUM_TILES
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._cache: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()

    def encode(
        self,
        run: Callable[..., Any],
        weights: list[Array],
        output: SchedulerOutput,
        batch: InputBatch,
    ) -> dict[int, str]:
        """Encodes the images that a step needs, and adds their vectors to the state of its sequences.

        Args:
            run: Runs a program.
            weights: The model's weights.
            output: The step.
            batch: State of the batch slots; updated.

        Returns:
            Error messages by batch slot, for sequences whose image could not be encoded. These sequences must
            end, and their results of the step are invalid.
        """
        needed = batch.features.missing_placeholder_data(output)
        if not needed:
            return {}
        found = {s.digest: self._cache[s.digest] for _, s in needed if s.digest in self._cache}
        new = {s.digest: s.data for _, s in needed if s.digest not in found}
        errors, failed = dict[int, str](), dict[str, str]()
        for digest, result in zip(new, self._encoded(run, weights, list(new.values())), strict=True):
            if isinstance(result, Exception):
                _LOGGER.error("an image could not be encoded", exc_info=result)
                failed[digest] = f"an image could not be encoded: {_shortened(result)}"
            else:
                found[digest] = result
        for batch_slot, placeholder in needed:
            if placeholder.digest in failed:
                errors[batch_slot] = failed[placeholder.digest]
            else:
                vectors = found[placeholder.digest]
                batch.features.embeds.setdefault(batch_slot, {})[placeholder.start] = vectors
        self._add_to_cache(found)
        return errors

    def clear(self) -> None:
        """Drops all cached vectors, because the weights have changed."""
        self._cache.clear()
        self._num_bytes = 0

    def _encoded(
        self, run: Callable[..., Any], weights: list[Array], images: list[Tile] | list[Patches]
    ) -> list[Float[np.ndarray, "n e"] | Exception]:
        """Returns, for each image or tile, its vectors or the error that occurred."""
        size = 1 if isinstance(next(iter(images), None), Patches) else self._sizes[-1]
        groups = [images[i : i + size] for i in range(0, len(images), size)]
        return [result for group in groups for result in self._encoded_group(run, weights, group)]

    def _encoded_group(
        self, run: Callable[..., Any], weights: list[Array], group: Sequence[Tile | Patches]
    ) -> list[Float[np.ndarray, "n e"] | Exception]:
        try:
            if isinstance(group[0], Patches):
                return [_encode_patches(run, weights, group[0])]  # a group contains a single image of patches
            return [*self._encode_tiles(run, weights, group)]
        except Exception as error:  # any error of XLA, such as out of memory
            if len(group) == 1:
                return [error]
        # The images may belong to several requests. They are encoded again one by one, so that only the
        # requests with a failing image end.
        return [result for image in group for result in self._encoded_group(run, weights, [image])]

    def _encode_tiles(
        self, run: Callable[..., Any], weights: list[Array], tiles: Sequence[Any]
    ) -> list[Float[np.ndarray, "n e"]]:
        size = next(n for n in self._sizes if n >= len(tiles))
        # Padded with copies of the last tile, whose results are dropped.
        columns = zip(*tiles, *[tiles[-1]] * (size - len(tiles)), strict=True)
        out = np.asarray(run(EncodeImagesProgram(size), weights, *map(np.stack, columns)))
        return [x.copy() for x in out[: len(tiles)]]

    def _add_to_cache(self, found: dict[str, np.ndarray]) -> None:
        """Adds vectors to the cache. Evicts the least recently used ones if the cache is too large."""
        for digest, vectors in found.items():
            if digest not in self._cache:
                self._num_bytes += vectors.nbytes
            self._cache[digest] = vectors
            self._cache.move_to_end(digest)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._cache.popitem(last=False)[1].nbytes
