"""The weights of a model as a flat list on the device, their exchange, and the model that they make."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_paged.config.engine_args import EngineArgs
from jax_paged.errors import check, check_choice
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.checkpoint import resolve_model_dir
from jax_paged.models.forward_context import Module
from jax_paged.models.layers import Embedding, Linear
from jax_paged.models.loading.new_weights import NewWeights, with_weights
from jax_paged.models.parallel.sharding import DeviceGrid, Split, taken, whole_shape
from jax_paged.models.parallel.stages import num_bytes, split_model
from jax_paged.models.quantization.quantize import kind_to_make, outline_kind, quantized
from jax_paged.models.quantization.quantized_linear import KIND_DTYPES, Kind, QuantizedWeight
from jax_paged.models.weights import LoadedModel, load_stages, loaded_from, outline


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

    def merge(self, weights: Sequence[Any]) -> M:
        """Returns the model with these weights; what follows them in the list is left alone."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, weights[: self.num_weights]))


def load(
    args: EngineArgs,
    loaded: LoadedModel | LanguageModel | None,
    grids: Sequence[DeviceGrid],
    own: Sequence[int],
) -> list[LoadedModel]:
    """Returns the stages of the model that an engine serves; what is loaded lies on the devices of grids.

    Args:
        args: Name the model and its tokenizer.
        loaded: A model in memory in place of it, which is a single stage. What a module alone does not tell,
            such as end tokens, is read where the tokenizer lies, if that is a folder.
        grids: The devices of each stage.
        own: The stages whose weights are read; the others have shapes in their places.

    Raises:
        ValueError: If it can't be loaded or divided, or is of another type than is asked for.
    """
    grid, num_stages = grids[0], len(grids)
    if loaded is None:
        folder = resolve_model_dir(args.model), args.dtype, args.max_model_len, args.hf_overrides or {}
        folder = *folder, args.quantization
        if grid.num_devices > 1:
            check_divided(outline(*folder), grid)
        if num_stages > 1:
            check_stages(outline(*folder), num_stages)
        return load_stages(*folder, grids, own)
    allowed = "1 with a model in memory"
    check(num_stages == 1, "pipeline_parallel_size", num_stages, allowed)
    if isinstance(loaded, LanguageModel):
        name = args.tokenizer or ""
        is_folder = name == "pagelet" or (bool(name) and Path(name).expanduser().is_dir())
        loaded = loaded_from(loaded, resolve_model_dir(name) if is_folder else None)
    check_choice("dtype", args.dtype, ("auto", str(loaded.dtype)))
    check_choice("quantization", args.quantization, (None, *KIND_DTYPES))
    small = outline_kind(outline_of(loaded.model), kind_to_make([loaded.model], args.quantization))
    check_divided(small, grid)
    return [dataclasses.replace(loaded, weight_bytes=num_bytes(small))]


def check_stages(model: LanguageModel, num_stages: int) -> None:
    """Checks that a model has so many stages.

    Raises:
        ValueError: If it has not.
    """
    try:
        split_model(model, num_stages)
    except ValueError as error:
        check(False, "pipeline_parallel_size", num_stages, str(error))


def check_divided(model: LanguageModel, grid: DeviceGrid) -> None:
    """Checks that the devices of a grid can share a model.

    Raises:
        ValueError: If a weight can't be divided; the message lists what is allowed for each kind of weight.
    """
    problems: dict[str, str] = {}
    for path, param in nnx.to_flat_state(nnx.state(model)):
        try:
            grid.columns(param.get_metadata().get("split", ()))
        except ValueError as error:
            problems.setdefault(str(error), ".".join(map(str, path)))
    allowed = ", ".join(f"{what} ({path})" for what, path in problems.items())
    check(not problems, "tensor_parallel_size", grid.num_devices, allowed)


def packed[M: nnx.Module](model: M, *, in_place: bool) -> M:
    """Returns a model whose products are oneDNN's: its kernels are packed, but for small ones.

    Packed kernels are made of the weights as they are now: whoever changes these packs them again.

    Args:
        model: In one of the types that oneDNN multiplies.
        in_place: Whether each kernel may be freed when it is packed; else a copy is packed, which shares all
            other weights.
    """
    if not in_place:
        model = nnx.merge(*nnx.split(model))
    modules = [module for _, module in nnx.iter_modules(model)]
    alone = {m: None for m in modules if isinstance(m, Linear) and not isinstance(m.kernel, QuantizedWeight)}
    for module in modules:
        names = module.same_input if isinstance(module, Module) else ()
        if maps := [m for name in names if (m := getattr(module, name)) in alone]:
            Linear.pack(maps)
        for m in maps:
            del alone[m]
    for module in alone:
        Linear.pack([module])
    if isinstance(model, LanguageModel) and isinstance(model.head, Embedding) and model.ends:
        model.head.pack()
    return model


def flatten[M: nnx.Module](model: M) -> tuple[FlatModel[M], list[Any], list[Split]]:
    """Returns a model without weights, its weights as they are, and how each of them is divided."""
    graphdef, state = nnx.split(model)
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    splits = [v.get_metadata().get("split", (None,) * v.get_raw_value().ndim) for v in variables]
    leaves, treedef = jax.tree.flatten(state)
    assert len(leaves) == len(splits), "every weight says how it is divided"
    return FlatModel(graphdef, treedef), leaves, splits


def outline_of[M: nnx.Module](model: M) -> M:
    """Returns a model with the shapes that its weights have in a checkpoint, wherever they lie."""
    flat, weights, splits = flatten(model)
    shapes = [whole_shape(x.shape, split) for x, split in zip(weights, splits, strict=True)]
    return flat.merge([jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, weights, strict=True)])


def placed(
    weights: Sequence[Any], splits: Sequence[Split], grid: DeviceGrid, *, are_in_order: bool
) -> list[Array]:
    """Returns weights on the devices of a grid.

    Args:
        weights: As a checkpoint has them, or in the order of the devices.
        splits: How they are divided.
        grid: The devices.
        are_in_order: Whether they are in the order of the devices, as `load` has read them.
    """
    if not are_in_order:
        columns = [grid.columns(split) for split in splits]
        weights = [
            weight if all(c is None for c in cs) else taken(np.asarray(weight), cs)
            for weight, cs in zip(weights, columns, strict=True)
        ]
    return jax.device_put(list(weights), [grid.sharding(split) for split in splits])


class ServedWeights:
    """The weights that programs are called with; they can be exchanged, and the programs stay.

    Args:
        model: The model.
        is_own: Whether the model may be packed in place, and its weights freed; else they stay the caller's,
            who may go on training it.
        packs: Whether oneDNN multiplies.
        kind: What float kernels become that are not small yet; None if they stay.
        grid: The devices that they are divided among; weights that are loaded lie there already.
        extra: Arrays that programs get behind the weights; copied to every device.

    Attributes:
        model: The model without its weights.
        arrays: Weights and extra arrays; always the same list. A weight that was freed has its shape there.
        are_dropped: Whether the weights are neither on the device nor in host memory.
        is_own: Whether nobody else has the weights, so that `check` would find nothing.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        is_own: bool,
        packs: bool,
        kind: Kind | None,
        grid: DeviceGrid,
        extra: list[Any],
    ) -> None:
        given = jax.tree.leaves(nnx.state(model))
        self._like = outline_kind(outline_of(model), kind)
        self._grid, self._packs = grid, packs
        self._kind: Kind | None = kind
        self.arrays: list[Any] = []
        self.is_own, self._watched = is_own, _watch(None if is_own else model)
        self._kept: dict[int, np.ndarray] = {}  # weights that are in host memory, by their places in `arrays`
        self._extra: dict[int, np.ndarray] = {}  # what is behind the weights, while it is in host memory
        self.are_dropped = False
        self.model, weights = self._flat(model, [] if is_own else given, are_placed=is_own)
        placed = jax.device_put([jnp.asarray(x) for x in extra], NamedSharding(grid.mesh, PartitionSpec()))
        self.arrays += [*weights, *placed]

    def replace(self, new: NewWeights, overrides: Mapping[str, Any]) -> None:
        """Serves other weights from the next step on; those on a device are shared, not copied.

        Args:
            new: As exchange.with_weights takes it.
            overrides: Fields in place of those of a folder's config.json.

        Raises:
            ValueError: If they do not fit the model; nothing has changed then.
        """
        if not isinstance(new, LanguageModel | nnx.State | Mapping | str | Path):
            new = dict(new)  # pairs, which may come only once
        # The engine's max_model_len may be less: rotary positions are those that the model was loaded with.
        max_model_len = self._like.config.max_position_embeddings
        model = with_weights(self._like, new, max_model_len, overrides, self._grid, self._kind)
        self.is_own = isinstance(new, str | Path)
        given = nnx.state(new) if isinstance(new, LanguageModel) else None if self.is_own else new
        old = [x for x, is_shared in zip(self.arrays, self._is_shared, strict=False) if not is_shared]
        flat, weights = self._flat(model, jax.tree.leaves(given), are_placed=self.is_own)
        assert flat.treedef == self.model.treedef, "other weights are flattened in the same order"
        self.arrays[: len(weights)] = weights
        for array in old:
            if isinstance(array, jax.Array):
                array.delete()
        self._kept, self.are_dropped = {}, False
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
        arrays = [array for array in self.arrays if isinstance(array, jax.Array)]
        if not self.is_own and any(array.is_deleted() for array in arrays):
            raise RuntimeError(
                "weights that are served were deleted: a program that they were donated to has taken their "
                "memory; call update_weights with the new ones"
            )

    def free(self, *, keeps: bool) -> None:
        """Frees the weights that nobody else has; programs must not run until `restore` or `replace`.

        Args:
            keeps: Whether they are kept in host memory, and what the caller shares is held on to; else
                `replace` has to bring weights.
        """
        for i, is_shared in enumerate(self._is_shared):
            array = self.arrays[i]
            if keeps and is_shared:
                continue
            if keeps:
                self._kept[i] = np.array(array)  # never a view of what is deleted
            self.arrays[i] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            if not is_shared:
                array.delete()
        if not keeps:
            self.are_dropped, self._watched = True, []

    def restore(self) -> None:
        """Brings the weights back that are kept in host memory."""
        assert not self.are_dropped, "there is nothing to bring back"
        for i, kept in self._kept.items():
            self.arrays[i] = jax.device_put(kept, self.arrays[i].sharding)
        self._kept = {}

    def free_extra(self) -> None:
        """Moves the arrays behind the weights to host memory; programs must not run until they are back."""
        for i in range(len(self._is_shared), len(self.arrays)):
            array = self.arrays[i]
            self._extra[i] = np.array(array)
            # Not deleted: somebody else may have it too.
            self.arrays[i] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)

    def restore_extra(self) -> None:
        """Brings the arrays behind the weights back."""
        for i, kept in self._extra.items():
            self.arrays[i] = jax.device_put(kept, self.arrays[i].sharding)
        self._extra = {}

    def close(self) -> None:
        """Frees the weights, unless they are the caller's."""
        for i, array in enumerate(self.arrays):
            is_ours = not self._is_shared[i] if i < len(self._is_shared) else self.is_own
            if is_ours and isinstance(array, jax.Array):
                array.delete()
        self.arrays, self._watched, self._kept = [], [], {}

    def _flat(
        self, model: LanguageModel, given: Collection[Any], *, are_placed: bool
    ) -> tuple[FlatModel[LanguageModel], list[Array]]:
        """Returns a model without its weights, and these on the mesh; notes which are the caller's arrays.

        What was packed or made small and nobody else has is deleted: modules refer to each other, and would
        keep it until Python looks for garbage.
        """
        before = jax.tree.leaves(nnx.state(model))
        own = quantized(model, self._kind)
        own = packed(own, in_place=self.is_own) if self._packs else own
        flat, weights, splits = flatten(own)
        callers, served = {id(array) for array in given}, {id(array) for array in weights}
        self._is_shared = [id(array) in callers for array in weights]
        for array in before:
            if id(array) not in callers | served:
                array.delete()
        return flat, placed(weights, splits, self._grid, are_in_order=are_placed)


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
