"""The weights of a model as a flat list on the device, their exchange, and the model that they make."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_paged.checks import check_choice
from jax_paged.config import EngineArgs
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.checkpoint import read_json, resolve_model_dir
from jax_paged.models.exchange import NewWeights, with_weights
from jax_paged.models.forward_context import Module
from jax_paged.models.layers import Embedding, Linear
from jax_paged.models.pooling import PoolingSpec, read_pooling
from jax_paged.models.weights import LoadedModel, load_model, loaded_from


@dataclasses.dataclass(frozen=True, eq=False)
class FlatModel[M: nnx.Module]:
    """A model without its weights. These travel as a flat list: a nested one costs twice as much per step.

    Args:
        graphdef: The model's structure.
        treedef: Of its state.
    """

    graphdef: Any
    treedef: Any

    @property
    def num_weights(self) -> int:
        """How many arrays the weights are."""
        return self.treedef.num_leaves

    def merge(self, weights: list[Array]) -> M:
        """Returns the model with these weights; what follows them in the list is left alone."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, weights[: self.num_weights]))


def load(args: EngineArgs, loaded: LoadedModel | LanguageModel | None) -> LoadedModel:
    """Returns the model that an engine serves.

    Args:
        args: Name the model and its tokenizer.
        loaded: A model in memory in place of it. What a module alone does not tell, such as end tokens, is
            read where the tokenizer lies, if that is a folder.

    Raises:
        ValueError: If it can't be loaded, or is of another type than is asked for.
    """
    if loaded is None:
        return load_model(
            resolve_model_dir(args.model), args.dtype, args.max_model_len, args.hf_overrides or {}
        )
    if isinstance(loaded, LanguageModel):
        name = args.tokenizer or ""
        is_folder = name == "pagelet" or (bool(name) and Path(name).expanduser().is_dir())
        loaded = loaded_from(loaded, resolve_model_dir(name) if is_folder else None)
    check_choice("dtype", args.dtype, ("auto", str(loaded.dtype)))
    return loaded


def pooling_of(args: EngineArgs, loaded: LoadedModel, *, is_own: bool) -> PoolingSpec | None:
    """Returns what the model that an engine serves makes of texts; None if it only draws tokens.

    Raises:
        ValueError: If it can't be what the arguments ask for.
    """
    folder = resolve_model_dir(args.model) if is_own else None
    hf_config = {} if folder is None else read_json(folder / "config.json")
    pooler = args.pooler
    return read_pooling(
        folder,
        hf_config | (args.hf_overrides or {}),
        loaded.architecture,
        loaded.config.hidden_size,
        pools={"pooling": True, "generate": False}.get(args.runner),
        pooling_type=pooler.pooling_type,
        normalize=pooler.normalize if pooler.use_activation is None else pooler.use_activation,
    )


def packed[M: nnx.Module](model: M, *, in_place: bool) -> M:
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
    if isinstance(model, LanguageModel) and isinstance(model.head, Embedding):
        model.head.pack()
    return model


def flatten[M: nnx.Module](
    model: M, mesh: Mesh | AbstractMesh
) -> tuple[FlatModel[M], list[Any], list[NamedSharding]]:
    """Returns a model without weights, its weights as they are, and how a mesh splits each of them."""
    graphdef, state = nnx.split(model)
    specs = jax.tree.leaves(nnx.get_partition_spec(state), is_leaf=lambda x: isinstance(x, PartitionSpec))
    leaves, treedef = jax.tree.flatten(state)
    assert len(leaves) == len(specs), f"{len(leaves)} weights, {len(specs)} of which say how they are split"
    return FlatModel(graphdef, treedef), leaves, [NamedSharding(mesh, spec) for spec in specs]


class ServedWeights:
    """The weights that programs are called with; they can be exchanged, and the programs stay.

    Args:
        model: The model.
        is_own: Whether the model may be packed in place, and its weights freed; else they stay the caller's,
            who may go on training it.
        packs: Whether oneDNN multiplies.
        mesh: Where the weights lie.
        extra: Arrays that programs get behind the weights; copied to every device.

    Attributes:
        model: The model without its weights.
        arrays: Weights and extra arrays; always the same list.
    """

    def __init__(
        self, model: LanguageModel, *, is_own: bool, packs: bool, mesh: Mesh, extra: list[Any]
    ) -> None:
        graphdef, state = nnx.split(model)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        self._like = nnx.merge(graphdef, shapes)
        self._mesh, self._packs = mesh, packs
        self.arrays: list[Array] = []
        self._is_own, self._watched = is_own, _watch(None if is_own else model)
        self.model, weights = self._flat(model)
        placed = jax.device_put([jnp.asarray(x) for x in extra], NamedSharding(mesh, PartitionSpec()))
        self.arrays += [*weights, *placed]

    def replace(self, new: NewWeights, max_model_len: int) -> None:
        """Serves other weights from the next step on; those on a device are shared, not copied.

        Args:
            new: As exchange.with_weights takes it.
            max_model_len: Maximum tokens of a text.

        Raises:
            ValueError: If they do not fit the model; nothing has changed then.
        """
        model = with_weights(self._like, new, max_model_len)
        self._is_own = isinstance(new, str | Path)
        flat, weights = self._flat(model)
        assert flat.treedef == self.model.treedef, "other weights are flattened in the same order"
        self.arrays[: len(weights)] = weights
        self._watched = _watch(new if isinstance(new, LanguageModel) else None)

    def check(self) -> None:
        """Raises an error if the caller's model has got other weights than those that are served.

        Raises:
            RuntimeError: If a parameter of the model was replaced, or an array was deleted.
        """
        if any(is_other() for is_other in self._watched):
            raise RuntimeError(
                "the model in memory has other weights than those that are served; call update_weights(model)"
            )
        if not self._is_own and any(array.is_deleted() for array in self.arrays):
            raise RuntimeError(
                "weights that are served were deleted: a program that they were donated to has taken their "
                "memory; call update_weights with the new ones"
            )

    def close(self) -> None:
        """Frees the weights, unless they are the caller's."""
        for array in self.arrays if self._is_own else []:
            array.delete()
        self.arrays, self._watched = [], []

    def _flat(self, model: LanguageModel) -> tuple[FlatModel[LanguageModel], list[Array]]:
        own = packed(model, in_place=self._is_own) if self._packs else model
        flat, weights, shardings = flatten(own, self._mesh)
        return flat, jax.device_put(weights, shardings)


def _watch(model: LanguageModel | None) -> list[Callable[[], bool]]:
    """Returns functions that tell whether a module or a weight of a model in memory is another one now."""

    def watch(names: dict[str, Any], name: str, item: nnx.Variable | nnx.Module) -> Callable[[], bool]:
        if isinstance(item, nnx.Module):
            return lambda: names.get(name) is not item
        array = item.get_raw_value()

        def is_other() -> bool:
            nonlocal array
            now = item.get_raw_value()
            if names.get(name) is item and now is not array and not array.is_deleted():
                # nnx.jit hands weights that a function has only read back in other arrays.
                if now.dtype != array.dtype or not bool(jnp.array_equal(now, array)):
                    return True
                array = now
            return names.get(name) is not item or now is not array

        return is_other

    modules = [] if model is None else [module for _, module in nnx.iter_modules(model)]
    return [
        watch(vars(module), name, item)
        for module in modules
        for name, item in vars(module).items()
        if isinstance(item, nnx.Variable | nnx.Module)
    ]
