"""LoRA in a forward pass: applies the adapters of a batch to the linear maps of a model, row by row.

The matrices of all adapter slots are concatenated: A is [in, slots * rank], and B is [slots * rank, out].
Every row is multiplied by all of A, the results for other slots than the row's own are set to 0, and the
product with B sums the rest:

    x [rows, in] @ A -> [rows, slots * rank] -> where(own slot, h, 0) -> @ B -> [rows, out], added to y

A row without an adapter adds exactly 0, so its output does not change. The result for a row does not depend
on the adapters of other rows. For a small number of slots and ranks, this is faster than gathering A and B
for each row.

Source: Hu et al., LoRA, 2021. Batches with several adapters: Chen et al., Punica, 2023, and Sheng et al.,
S-LoRA, 2023, whose kernels gather A and B.
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
from jax_paged.models.parallel.sharding import DeviceGrid, Split, take_columns

# Takes the input and the output of a module, and returns the new output.
RowFunction = Callable[[Array, Array], Array]


class LoraMap(NamedTuple):
    """A linear map that adapters may change.

    Args:
        path: Path of the module in the model.
        name: Name of the module in the checkpoint.
        num_in: Size of the input.
        num_out: Size of the output.
        split: How input and output dimension are divided among devices.
    """

    path: str
    name: str
    num_in: int
    num_out: int
    split: Split


@dataclasses.dataclass(frozen=True)
class LoraLayout:
    """Layout of the arrays on the device that hold the adapters of all slots.

    Args:
        maps: The linear maps. The arrays are in their order: A and B of the first map, A and B of the second
            map, and so on.
        num_slots: Number of adapters on the device. Slots are numbered from 1.
        rank: The maximum rank. Adapters of a lower rank are padded with zeros.
        dtype: The dtype of the arrays.
    """

    maps: tuple[LoraMap, ...]
    num_slots: int
    rank: int
    dtype: jnp.dtype

    def shapes(self, width: int, grid: DeviceGrid) -> list[tuple[int, ...]]:
        """Returns the shapes of A [in, width] and B [width, out] of each map, on all devices together.

        Args:
            width: num_slots * rank for the arrays of all slots, or rank for the arrays of one adapter.
            grid: The devices that share the model.
        """
        pairs = [((m.num_in, width), (width, m.num_out)) for m in self.maps]
        splits = self.splits
        return [grid.shape(s, split) for s, split in zip(itertools.chain(*pairs), splits, strict=True)]

    @property
    def splits(self) -> list[Split]:
        """The split of each array, derived from the split of its linear map."""
        return [split for m in self.maps for split in ((m.split[0], None), (None, m.split[1]))]

    def padded(self, adapter: Adapter, grid: DeviceGrid) -> list[np.ndarray]:
        """Returns the arrays of one adapter, padded to the maximum rank.

        Args:
            adapter: The adapter, with columns in the order of the checkpoint.
            grid: The devices that share the model. The columns of the result are in their order.

        Returns:
            [in, rank] and [rank, out] for each map, zeros for maps that the adapter does not change.
        """
        arrays: list[np.ndarray] = []
        for m in self.maps:
            a, b = np.zeros((m.num_in, self.rank), self.dtype), np.zeros((self.rank, m.num_out), self.dtype)
            if pair := adapter.pairs.get(m.name):
                rank = pair.a.shape[1]
                a[:, :rank], b[:rank] = pair.a, pair.b
            arrays += [a, b]
        return [take_columns(x, grid.columns(s)) for x, s in zip(arrays, self.splits, strict=True)]


def lora_maps(model: LanguageModel) -> tuple[LoraMap, ...]:
    """Returns the linear maps that adapters may change: all except the output head, routers and experts.

    Args:
        model: The model, or its outline.
    """
    found = []
    for parts, module in nnx.iter_modules(model):
        # Routers, a subclass of Linear, are excluded: adapters do not change which experts are selected.
        if type(module) is Linear and module is not model.head:
            path = ".".join(map(str, parts))
            name = model.weight_table.hf_key(f"{path}.kernel")[0].removesuffix(".weight")
            found.append(LoraMap(path, name, module.in_features, module.out_features, module.split))
    return tuple(sorted(found))


def row_functions(
    layout: LoraLayout, arrays: Sequence[Array], slots: Int[Array, " t"]
) -> Mapping[str, RowFunction]:
    """Returns the functions that apply adapters to linear maps, for `ForwardContext.output_edits`.

    Args:
        layout: Layout of the arrays.
        arrays: The arrays of all slots: [in, slots * rank] and [slots * rank, out] for each map.
        slots: int32 [T], slot of each token row; 0 for no adapter.

    Returns:
        A function for each linear map, by its path.
    """
    own = slots[:, None] == jnp.arange(1, layout.num_slots + 1)
    own = jnp.repeat(own, layout.rank, axis=1)

    def adapt(a: Array, b: Array) -> RowFunction:
        def add(x: Array, y: Array) -> Array:
            # A selection rather than a product with 0, because the results for other slots may be infinite.
            h = jnp.where(own, jnp.matmul(x, a, preferred_element_type=jnp.float32), 0).astype(x.dtype)
            out = jnp.matmul(h, b, preferred_element_type=jnp.float32)
            return (y.astype(jnp.float32) + out).astype(y.dtype)

        return add

    pairs = zip(layout.maps, arrays[::2], arrays[1::2], strict=True)
    return {m.path: adapt(a, b) for m, a, b in pairs}


def unchanged(layout: LoraLayout) -> Mapping[str, RowFunction]:
    """Returns functions that return each linear map's output unchanged, by path.

    With them, `gated` of models/layers.py computes the gate and up projections separately, as in a pass with
    adapters, so that rounding is the same.

    Args:
        layout: Layout of the arrays, which lists the linear maps.
    """
    return {m.path: lambda x, y: y for m in layout.maps}
