"""Where a layer's keys and values are in the pool, and how layers that differ in heads share its arrays."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class View(NamedTuple):
    """How a layer sees an array of the pool whose pages were made for layers with more numbers per token.

    A page of the array is several of the layer's, of which it has one; the others belong to other layers of
    its cache group. The bytes stay where they are:

        array            page 0              page 1
        layers a, b      0: a    1: b        2: a    3: b

    Args:
        head_dim: Size of the layer's heads.
        num_parts: Pages of the layer's size in a page of the array, on every device.
        part: Which of them is the layer's.
    """

    head_dim: int
    num_parts: int
    part: int

    def pages(self, kv_pages: Any, num_devices: int = 1) -> Any:
        """Returns the array as pages of the layer's size.

        Args:
            kv_pages: [P, 2, K, S, D], the array, of JAX or NumPy, or what one device has of it.
            num_devices: How many devices' heads are in it, side by side.

        Returns:
            [P * num_parts, 2, heads of the layer, S, head_dim].
        """
        num_pages, _, heads, size, width = kv_pages.shape
        if num_devices == 1:
            return kv_pages.reshape(num_pages * self.num_parts, 2, -1, size, self.head_dim)
        x = kv_pages.reshape(num_pages, 2, num_devices, heads // num_devices, size, width).swapaxes(1, 2)
        x = x.reshape(num_pages, num_devices, self.num_parts, 2, -1, size, self.head_dim)
        x = x.transpose(0, 2, 3, 1, 4, 5, 6)
        return x.reshape(num_pages * self.num_parts, 2, -1, size, self.head_dim)

    def blocks(self, block_ids: Int[Array, "..."]) -> Int[Array, "..."]:
        """Returns the layer's pages of some blocks; of the null block, one that lies in it."""
        return block_ids * self.num_parts + self.part

    def slots(self, slots: Int[Array, "..."], num_blocks: int, block_size: int) -> Int[Array, "..."]:
        """Returns the layer's slots; those behind the array stay behind it."""
        blocks = self.blocks(jnp.minimum(slots // block_size, num_blocks))
        return blocks * block_size + slots % block_size


NO_GROUP = -1


class Place(NamedTuple):
    """Where a layer's keys and values are, or its states.

    Args:
        array: Of the pool; the first of several of states.
        group: Cache group, whose blocks they are in; NO_GROUP of states.
        view: How the layer sees the array; None if its heads are those of the array.
    """

    array: int
    group: int
    view: View | None = None
