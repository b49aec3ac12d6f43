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
from jax_paged.models.images import Tile
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.programs import Program, TraceContext

# Tiles that are encoded together.
NUM_TILES = (1, 4)


@dataclasses.dataclass(frozen=True)
class EncodeImagesProgram(Program):
    """Encodes so many tiles, as encode_images does; returns float32 [tiles, tokens, E]."""

    num_tiles: int

    def __str__(self) -> str:
        return f"images {self.num_tiles}"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        spec, n = context.image_spec, self.num_tiles
        assert spec is not None, "only a model that reads images has it"

        def encode(
            weights: list[Array], tiles: UInt8[Array, "b 3 s s"], scale: Array, offset: Array
        ) -> Float[Array, "b n e"]:
            model: Any = context.merge(weights)
            return model.encode_images(tiles, scale, offset).astype(jnp.float32)

        channels = context.shape((n, 3), jnp.float32)
        tiles = context.shape((n, 3, spec.tile_size, spec.tile_size), jnp.uint8)
        jitted = jax.jit(encode, out_shardings=context.replicated)
        return jitted.trace(context.weights, tiles, channels, channels)


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
        self, run: Callable[..., Any], weights: list[Array], tiles: list[Tile]
    ) -> list[Float[np.ndarray, "n e"]]:
        vectors: list[np.ndarray] = []
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
