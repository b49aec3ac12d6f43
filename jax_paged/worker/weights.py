"""The weights of a model as a flat list on the device, and the model that they make."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_paged.models.causal_lm import LanguageModel


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


def flatten(
    model: LanguageModel, mesh: Mesh | AbstractMesh
) -> tuple[FlatModel, list[Any], list[NamedSharding]]:
    """Returns a model without weights, its weights as they are, and how a mesh splits each of them."""
    graphdef, state = nnx.split(model)
    specs = jax.tree.leaves(nnx.get_partition_spec(state), is_leaf=lambda x: isinstance(x, PartitionSpec))
    leaves, treedef = jax.tree.flatten(state)
    assert len(leaves) == len(specs), f"{len(leaves)} weights, {len(specs)} of which say how they are split"
    return FlatModel(graphdef, treedef), leaves, [NamedSharding(mesh, spec) for spec in specs]
