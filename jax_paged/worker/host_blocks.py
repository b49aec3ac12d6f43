"""Host memory for blocks that are swapped out; each process has that of its own devices."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

# The dimension of the pool's arrays that is divided: kv heads.
_HEADS = 2


class HostBlocks:
    """Owns host memory for the part of each block that lies on this process's devices.

    Args:
        shapes: Of the arrays of the pool, with as many blocks as host memory has, and where they lie.

    Attributes:
        arrays: Host memory, an array per array of the pool; it is taken as it is written to.
    """

    def __init__(self, shapes: list[jax.ShapeDtypeStruct]) -> None:
        self._shapes = shapes
        self.arrays: list[np.ndarray] = []
        self._first = 0
        for shape in shapes:
            parts = shape.sharding.addressable_devices_indices_map(shape.shape).values()
            heads = [part[_HEADS].indices(shape.shape[_HEADS])[:2] for part in parts if part]
            self._first, end = min(first for first, _ in heads), max(end for _, end in heads)
            local = (*shape.shape[:_HEADS], end - self._first, *shape.shape[_HEADS + 1 :])
            self.arrays.append(np.empty(local, shape.dtype))

    def store(self, places: Int[np.ndarray, " n"], blocks: list[Array]) -> None:
        """Waits for blocks and keeps them.

        Args:
            places: Where in host memory.
            blocks: Per array of the pool, as many blocks or more.
        """
        for memory, array in zip(self.arrays, blocks, strict=True):
            for shard in array.addressable_shards:
                heads = self._local(shard.index, array.shape)
                memory[places, :, heads] = np.asarray(shard.data)[: len(places)]

    def load(self, places: Int[np.ndarray, " n"]) -> list[Array]:
        """Returns what is kept in some places, on the devices, per array of the pool."""
        arrays = []
        for memory, whole in zip(self.arrays, self._shapes, strict=True):
            taken, shape = memory[places], (len(places), *whole.shape[1:])

            def part(index: Any, taken: np.ndarray = taken, shape: tuple[int, ...] = shape) -> np.ndarray:
                return taken[:, :, self._local(index, shape)]

            arrays.append(jax.make_array_from_callback(shape, whole.sharding, part))
        return arrays

    def _local(self, index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
        """Returns the heads of a device in this process's memory, of the index of its part of all."""
        first, end, _ = index[_HEADS].indices(shape[_HEADS])
        return slice(first - self._first, end - self._first)
