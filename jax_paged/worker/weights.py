"""The weights of a model as a flat list on the device, and the model that they make."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.forward_context import Module
from jax_paged.models.layers import Embedding, Linear


@dataclasses.dataclass(frozen=True, eq=False)
class FlatModel:
    """A model without its weights. These travel as a flat list: a nested one costs twice as much per step.

    Args:
        graphdef: The model's structure.
        treedef: Of its state.
    """

    graphdef: Any
    treedef: Any

    def merge(self, weights: list[Array]) -> LanguageModel:
        """Returns the model with these weights."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, weights))


def packed(model: LanguageModel, *, in_place: bool) -> LanguageModel:
    """Returns a model whose products are oneDNN's: its kernels are packed.

    Packed kernels are made of the weights as they are now: whoever changes these packs them again.

    Args:
        model: In one of the types that oneDNN multiplies.
        in_place: Whether each kernel may be freed when it is packed; else a copy is packed, which shares all
            other weights.
    """
    if not in_place:
        model = nnx.merge(*nnx.split(model))
    modules = [module for _, module in nnx.iter_modules(model)]
    alone = {module: None for module in modules if isinstance(module, Linear)}
    for module in modules:
        if isinstance(module, Module) and module.same_input:
            maps = [getattr(module, name) for name in module.same_input]
            Linear.pack(maps)
            for m in maps:
                del alone[m]
    for module in alone:
        Linear.pack([module])
    head = model.head
    if isinstance(head, Embedding):
        head.pack()
    return model


def flatten(
    model: LanguageModel, mesh: Mesh | AbstractMesh
) -> tuple[FlatModel, list[Any], list[NamedSharding]]:
    """Returns a model without weights, its weights as they are, and how a mesh splits each of them."""
    graphdef, state = nnx.split(model)
    specs = jax.tree.leaves(nnx.get_partition_spec(state), is_leaf=lambda x: isinstance(x, PartitionSpec))
    leaves, treedef = jax.tree.flatten(state)
    assert len(leaves) == len(specs), f"{len(leaves)} weights, {len(specs)} of which say how they are split"
    return FlatModel(graphdef, treedef), leaves, [NamedSharding(mesh, spec) for spec in specs]
