"""LoRA in a forward pass: what the adapters of a batch add to the linear maps of a model, row by row.

The adapters of all slots lie side by side: A [in, slots * rank], B [slots * rank, out]. Every row is
multiplied by all of A; what is not of its own slot becomes 0, and the product with B adds up what is left:

    x [rows, in] @ A -> [rows, slots * rank] -> where(own slot, h, 0) -> @ B -> [rows, out], added to y

A row without an adapter gets 0, so that its y stays what it is, to the bit, and what a row gets does not
depend on the slots of the others. For the few ranks of a slot this is quicker than a gather of A and B for
each row.

Source: Hu et al., LoRA, 2021; the batch of several adapters: Chen et al., Punica, 2023, Sheng et al., S-LoRA,
2023, whose kernels gather.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.features.lora.adapter_files import Adapter
from jax_paged.models.layers import Linear
from jax_paged.models.parallel.sharding import DeviceGrid, Split, taken

# What becomes of a module's output, by what it was given and has returned.
RowFunction = Callable[[Array, Array], Array]


class LoraMap(NamedTuple):
    """A linear map that adapters may change.

    Args:
        path: Where it stands in the model.
        name: Its name in the checkpoint.
        num_in: Size of what it takes.
        num_out: Size of what it returns.
        split: How the two are divided among devices.
    """

    path: str
    name: str
    num_in: int
    num_out: int
    split: Split


@dataclasses.dataclass(frozen=True)
class LoraLayout:
    """The arrays of all slots.

    Args:
        maps: In the order of their arrays: A and B of the first, A and B of the second, ...
        num_slots: Adapters on the device at a time; slots are numbered from 1.
        rank: The largest; smaller ones are padded with 0.
        dtype: Of the arrays.
    """

    maps: tuple[LoraMap, ...]
    num_slots: int
    rank: int
    dtype: jnp.dtype

    def shapes(self, width: int, grid: DeviceGrid) -> list[tuple[int, ...]]:
        """Returns the shapes of arrays of this width, on all devices together."""
        pairs = [((m.num_in, width), (width, m.num_out)) for m in self.maps]
        splits = self.splits
        return [grid.shape(s, split) for s, split in zip(itertools.chain(*pairs), splits, strict=True)]

    @property
    def splits(self) -> list[Split]:
        """How the arrays are divided among devices: as the kernels that they add to."""
        return [split for m in self.maps for split in ((m.split[0], None), (None, m.split[1]))]

    def padded(self, adapter: Adapter, grid: DeviceGrid) -> list[np.ndarray]:
        """Returns the arrays of one adapter, [in, rank] and [rank, out] for each map; 0 where it has none.

        Args:
            adapter: As its checkpoint has it.
            grid: The devices in whose order the columns are.
        """
        arrays: list[np.ndarray] = []
        for m in self.maps:
            a, b = np.zeros((m.num_in, self.rank), self.dtype), np.zeros((self.rank, m.num_out), self.dtype)
            if pair := adapter.pairs.get(m.name):
                rank = pair.a.shape[1]
                a[:, :rank], b[:rank] = pair.a, pair.b
            arrays += [a, b]
        return [taken(x, grid.columns(s)) for x, s in zip(arrays, self.splits, strict=True)]


def lora_maps(model: LanguageModel) -> tuple[LoraMap, ...]:
    """Returns the linear maps of a model that adapters may change: all but its head, routers and experts."""
    found = []
    for parts, module in nnx.iter_modules(model):
        # Routers are a subclass: which experts there are is not for an adapter to change.
        if type(module) is Linear and module is not model.head:
            path = ".".join(map(str, parts))
            name = model.weight_table.hf_key(f"{path}.kernel")[0].removesuffix(".weight")
            found.append(LoraMap(path, name, module.in_features, module.out_features, module.split))
    return tuple(sorted(found))


def row_functions(
    layout: LoraLayout, arrays: Sequence[Array], slots: Int[Array, " t"]
) -> Mapping[str, RowFunction]:
    """Returns what happens to the output of each linear map, by its path, for a ForwardContext.

    Args:
        layout: Of the arrays.
        arrays: Of all slots.
        slots: The slot of each token row; 0 for none.
    """
    own = slots[:, None] == jnp.arange(1, layout.num_slots + 1)
    own = jnp.repeat(own, layout.rank, axis=1)

    def adapt(a: Array, b: Array) -> RowFunction:
        def add(x: Array, y: Array) -> Array:
            # A select and not a factor: what does not concern a row may be infinite.
            h = jnp.where(own, jnp.matmul(x, a, preferred_element_type=jnp.float32), 0).astype(x.dtype)
            out = jnp.matmul(h, b, preferred_element_type=jnp.float32)
            return (y.astype(jnp.float32) + out).astype(y.dtype)

        return add

    pairs = zip(layout.maps, arrays[::2], arrays[1::2], strict=True)
    return {m.path: adapt(a, b) for m, a, b in pairs}


def unchanged(layout: LoraLayout) -> Mapping[str, RowFunction]:
    """Returns functions that change nothing, by path: no two maps are then computed as one (layers.gated)."""
    return {m.path: lambda x, y: y for m in layout.maps}
