"""Locations of the layers' KV caches in the pool, and views for layers that share an array."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class PageView(NamedTuple):
    """View of a pool array by a layer whose pages are smaller than the array's pages.

    Layers with different numbers or sizes of heads can share an array. The size of the array's pages is that
    of the layer with the largest pages. A layer with smaller pages sees each page of the array as `num_parts`
    pages of its own size and uses one of them. The other parts belong to other layers of its cache group. A
    view only reshapes the array; it does not move data:

        array            page 0              page 1
        layers a, b      0: a    1: b        2: a    3: b

    Args:
        head_dim: Size of the layer's heads.
        num_parts: Number of the layer's pages in one page of the array. If devices divide the heads, each
            device's part of a page has this number of pages.
        part: Index of the layer's part in a page of the array.
    """

    head_dim: int
    num_parts: int
    part: int

    def pages(self, kv_pages: Any, num_devices: int = 1) -> Any:
        """Returns the array reshaped to pages of the layer's size.

        Args:
            kv_pages: [P, 2, K, S, D], the pool array or one device's part of it; a JAX or NumPy array.
            num_devices: Number of devices whose heads are side by side in `kv_pages`.

        Returns:
            [P * num_parts, 2, kv heads of the layer, S, head_dim].
        """
        num_pages, _, heads, size, width = kv_pages.shape
        if num_devices == 1:
            return kv_pages.reshape(num_pages * self.num_parts, 2, -1, size, self.head_dim)
        x = kv_pages.reshape(num_pages, 2, num_devices, heads // num_devices, size, width).swapaxes(1, 2)
        x = x.reshape(num_pages, num_devices, self.num_parts, 2, -1, size, self.head_dim)
        x = x.transpose(0, 2, 3, 1, 4, 5, 6)
        return x.reshape(num_pages * self.num_parts, 2, -1, size, self.head_dim)

    def blocks(self, block_ids: Int[Array, "..."]) -> Int[Array, "..."]:
        """Returns the layer's pages for some blocks. The null block maps to a page inside the null block.

        Args:
            block_ids: int32 [...], blocks of the array.

        Returns:
            int32 [...].
        """
        return block_ids * self.num_parts + self.part

    def slots(self, slots: Int[Array, "..."], num_blocks: int, block_size: int) -> Int[Array, "..."]:
        """Returns the layer's slots for some slots of the array. Slots out of range stay out of range.

        Args:
            slots: int32 [...], slots of the array.
            num_blocks: Number of blocks in the array.
            block_size: Tokens per block.

        Returns:
            int32 [...].
        """
        blocks = self.blocks(jnp.minimum(slots // block_size, num_blocks))
        return blocks * block_size + slots % block_size


NO_GROUP = -1


class KVLocation(NamedTuple):
    """Location of a layer's keys and values, or of its recurrent states, in the pool.

    Args:
        array: Index in the list of pool arrays. A layer with several recurrent states has consecutive arrays,
            and this is the first of them.
        group: Index of the cache group whose block tables the layer uses; NO_GROUP for recurrent states.
        view: The layer's view of the array; None if the pages of the array have the layer's own shape.
    """

    array: int
    group: int
    view: PageView | None = None
