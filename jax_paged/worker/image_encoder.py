"""The encoder of images: it runs before the step that first needs one, and what it returns is kept."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.models.images import MAX_PATCHES, ImageSpec, Patches, PatchSpec, Tile
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.programs import Program, TraceContext

# Tiles that are encoded together.
NUM_TILES = (1, 4)
# The least that the patches of an image are padded to; larger sizes double.
MIN_PATCHES = 256


@dataclasses.dataclass(frozen=True)
class EncodeImagesProgram(Program):
    """Encodes so many tiles, as encode_images does; returns float32 [tiles, tokens, E]."""

    num_tiles: int

    def __str__(self) -> str:
        return f"images {self.num_tiles}"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        spec, n = context.image_spec, self.num_tiles
        assert isinstance(spec, ImageSpec), "only a model that cuts images into tiles has it"

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
    """Encodes an image of up to so many patches, as encode_images does; returns float32 [tokens, numbers]."""

    num_patches: int

    def __str__(self) -> str:
        return f"image of {self.num_patches}"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        spec = context.image_spec
        assert isinstance(spec, PatchSpec), "only a model that cuts images into patches has it"

        def encode(weights: list[Array], *image: Array) -> Float[Array, "m v"]:
            model: Any = context.merge(weights)
            return model.encode_images(*image).astype(jnp.float32)

        patches = context.shape((self.num_patches, 3 * spec.patch_size**2), jnp.uint8)
        channels, grid = context.shape((3,), jnp.float32), context.shape((2,), jnp.int32)
        jitted = jax.jit(encode, out_shardings=context.replicated)
        return jitted.trace(context.weights, patches, channels, channels, grid)


def plan_images(spec: ImageSpec | PatchSpec, max_model_len: int) -> list[Program]:
    """Returns the programs that encode images, the largest last.

    Args:
        spec: How prompts have images.
        max_model_len: Maximum tokens of a prompt.
    """
    if isinstance(spec, ImageSpec):
        return [EncodeImagesProgram(n) for n in NUM_TILES]
    most = _padded(min(MAX_PATCHES, max_model_len * spec.merge_size**2))
    return [EncodePatchesProgram(MIN_PATCHES << i) for i in range((most // MIN_PATCHES).bit_length())]


def _of_patches(run: Callable[..., Any], weights: list[Array], image: Patches) -> Float[np.ndarray, "n e"]:
    n, (num_rows, num_columns) = len(image.pixels), image.grid
    pixels = np.pad(image.pixels, ((0, _padded(n) - n), (0, 0)))
    args = pixels, image.scale, image.offset, np.array(image.grid, np.int32)
    out = np.asarray(run(EncodePatchesProgram(len(pixels)), weights, *args))
    return out[: num_rows * num_columns].copy()


def _padded(num_patches: int) -> int:
    """Returns how many patches a program has for so many."""
    return max(MIN_PATCHES, 1 << (num_patches - 1).bit_length())


class ImageEncoder:
    """Encodes what a step needs of images, each of their tiles once.

    Args:
        max_bytes: Of the vectors that are kept; those used last stay.
        batch_invariant: Whether the vectors of a tile may not depend on how many are encoded with it.
    """

    def __init__(self, max_bytes: int, *, batch_invariant: bool = False) -> None:
        self._sizes = NUM_TILES[-1:] if batch_invariant else NUM_TILES
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()

    def encode(
        self,
        run: Callable[..., Any],
        weights: list[Array],
        output: SchedulerOutput,
        batch: InputBatch,
    ) -> None:
        """Gives the seats of a step the vectors of all tokens that it computes.

        Args:
            run: Runs a program.
            weights: Of the model.
            output: The step.
            batch: The seats; updated.
        """
        needed = batch.missing_stand_ins(output)
        if not needed:
            return
        found = {s.digest: self._kept[s.digest] for _, s in needed if s.digest in self._kept}
        new = {s.digest: s.data for _, s in needed if s.digest not in found}
        found |= zip(new, self._encoded(run, weights, list(new.values())), strict=True)
        for seat, stand_in in needed:
            batch.embeds.setdefault(seat, {})[stand_in.start] = found[stand_in.digest]
        self._keep(found)

    def clear(self) -> None:
        """Forgets all vectors: they were made with other weights."""
        self._kept.clear()
        self._num_bytes = 0

    def _encoded(
        self, run: Callable[..., Any], weights: list[Array], tiles: list[Tile] | list[Patches]
    ) -> list[Float[np.ndarray, "n e"]]:
        vectors = [_of_patches(run, weights, image) for image in tiles if isinstance(image, Patches)]
        while len(vectors) < len(tiles):
            part = tiles[len(vectors) :][: self._sizes[-1]]
            size = next(n for n in self._sizes if n >= len(part))
            # Padded with the last one, whose vectors are dropped.
            columns = zip(*part, *[part[-1]] * (size - len(part)), strict=True)
            out = np.asarray(run(EncodeImagesProgram(size), weights, *map(np.stack, columns)))
            vectors += [x.copy() for x in out[: len(part)]]
        return vectors

    def _keep(self, found: dict[str, np.ndarray]) -> None:
        for digest, vectors in found.items():
            if digest not in self._kept:
                self._num_bytes += vectors.nbytes
            self._kept[digest] = vectors
            self._kept.move_to_end(digest)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
