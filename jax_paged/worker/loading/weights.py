"""The weights of a served model: loading, packing, replacing and freeing them.

Programs receive the weights as a flat list of arrays and rebuild the model from them (FlatModel).
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from jax_paged.models.loading.pretrained import PRETRAINED
from jax_paged.models.moe import Experts
from jax_paged.models.parallel.sharding import DeviceGrid, Split, take_columns, whole_shape
from jax_paged.models.parallel.stages import num_bytes, split_model
from jax_paged.models.quantization import packed_weight
from jax_paged.models.quantization.quantize import (
    choose_online_dtype,
    kernel_places,
    quantize_model,
    quantize_outline,
)
from jax_paged.models.quantization.quantized_linear import ONLINE_DTYPES, OnlineDtype, QuantizedWeight
from jax_paged.models.weights import LoadedModel, as_loaded_model, load_stages, outline
from jax_paged.worker.loading.mesh import Packing


@dataclasses.dataclass(frozen=True, eq=False)
class FlatModel[M: nnx.Module]:
    """A model without its weights.

    The weights are passed to programs as a flat list, because passing a nested structure takes twice as long
    per step.

    Args:
        graphdef: The structure of the model.
        treedef: The tree structure of its state.
    """

    graphdef: Any
    treedef: Any

    @property
    def num_weights(self) -> int:
        """The number of weight arrays."""
        return self.treedef.num_leaves

    def merge(self, weights: Sequence[Any]) -> M:
        """Returns the model with these weights. Further arrays at the end of the list are ignored."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, weights[: self.num_weights]))


def load(
    args: EngineArgs,
    loaded: LoadedModel | LanguageModel | None,
    grids: Sequence[DeviceGrid],
    local_stages: Sequence[int],
) -> list[LoadedModel]:
    """Returns the stages of the model that an engine serves, with weights on the devices of `grids`.

    Args:
        args: Arguments of the engine, which contain the model and its tokenizer.
        loaded: A model in memory that replaces args.model and has a single stage. Information that a module
            does not contain, such as end tokens, is read from the tokenizer's folder, if args.tokenizer is a
            folder. Its weights stay where they are.
        grids: The devices of each stage.
        local_stages: Indices of the stages whose weights are read. The other stages have shapes instead.

    Raises:
        ValueError: If the model cannot be loaded or divided, or has another dtype or quantization than
            requested.
    """
    grid, num_stages = grids[0], len(grids)
    if loaded is None:
        source = resolve_model_dir(args.model), args.dtype, args.max_model_len, args.hf_overrides or {}
        source = *source, args.quantization
        if grid.num_devices > 1:
            check_divided(outline(*source), grid)
        if num_stages > 1:
            check_stages(outline(*source), num_stages)
        return load_stages(*source, grids, local_stages)
    allowed = "1 with a model in memory"
    check(num_stages == 1, "pipeline_parallel_size", num_stages, allowed)
    if isinstance(loaded, LanguageModel):
        name = args.tokenizer or ""
        # "pagelet" is the built-in model.
        is_short_name = name == "pagelet" or name in PRETRAINED
        is_folder = is_short_name or (bool(name) and Path(name).expanduser().is_dir())
        loaded = as_loaded_model(loaded, resolve_model_dir(name) if is_folder else None)
    check_choice("dtype", args.dtype, ("auto", str(loaded.dtype)))
    check_choice("quantization", args.quantization, (None, *ONLINE_DTYPES))
    served_outline = quantize_outline(
        outline_of(loaded.model), choose_online_dtype([loaded.model], args.quantization)
    )
    check_divided(served_outline, grid)
    return [dataclasses.replace(loaded, weight_bytes=num_bytes(served_outline))]


def check_stages(model: LanguageModel, num_stages: int) -> None:
    """Raises ValueError if a model cannot be split into a number of stages.

    Args:
        model: The model.
        num_stages: The number of stages.

    Raises:
        ValueError: If the model cannot be split.
    """
    try:
        split_model(model, num_stages)
    except ValueError as error:
        check(False, "pipeline_parallel_size", num_stages, str(error))


def check_divided(model: LanguageModel, grid: DeviceGrid) -> None:
    """Raises ValueError if a model cannot be divided among the devices of a grid.

    Args:
        model: The model.
        grid: The devices.

    Raises:
        ValueError: If a weight cannot be divided; the message lists the numbers of devices that are allowed.
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
    """Returns a model whose matrix products are computed by oneDNN with packed weights.

    Packed weights are copies of the current weights. They must be packed again when the weights change.
    Linear modules with the same input share one packed weight. Quantized weights are not packed.

    Args:
        model: A model in a dtype that oneDNN supports.
        in_place: Whether each weight may be freed once it is packed. Otherwise a copy of the model is packed,
            which shares all other weights.
    """
    if not in_place:
        model = nnx.merge(*nnx.split(model))
    modules = [module for _, module in nnx.iter_modules(model)]
    for maps in _same_input(modules, lambda m: isinstance(m.kernel, nnx.Param)):
        Linear.pack(maps)
    head = model.head if isinstance(model, LanguageModel) and model.is_last_stage else None
    if isinstance(head, Embedding) and isinstance(head.embedding, nnx.Param):
        head.pack()
    return model


def packed_quantized[M: nnx.Module](model: M, *, in_place: bool) -> M:
    """Returns a model whose quantized weights are packed for the native backend.

    Linear modules with the same input share one packed weight if their weights are quantized in the same way.
    Weights that cannot be packed remain as they are.

    Args:
        model: A model on one device.
        in_place: Whether each weight is freed once it is packed. Otherwise a copy of the model is packed,
            which shares all other weights.
    """
    if not in_place:
        model = nnx.merge(*nnx.split(model))
    modules = [module for _, module in nnx.iter_modules(model)]
    for maps in _same_input(modules, lambda m: isinstance(m.kernel, QuantizedWeight)):
        kernels = [m.kernel for m in maps]
        Linear.pack_quantized(maps)
        if in_place:
            _free(kernel for m, kernel in zip(maps, kernels, strict=True) if m.kernel is not kernel)
    for module in modules:
        is_table = isinstance(module, Embedding)
        names = module.kernel_names if isinstance(module, Experts) else ("embedding",) if is_table else ()
        for name in names:
            kernel = getattr(module, name)
            if isinstance(kernel, QuantizedWeight) and (found := packed_weight.pack([kernel])):
                setattr(module, name, found[0][0])
                if in_place:
                    _free([kernel])
    return model


def _free(weights: Iterable[Any]) -> None:
    """Deletes the arrays of quantized weights."""
    for array in jax.tree.leaves([weight.arrays for weight in weights]):
        array.delete()


def _same_input(
    modules: Sequence[nnx.Module], is_chosen: Callable[[Linear], bool]
) -> Iterator[Sequence[Linear]]:
    """Yields the chosen linear maps; maps that have the same input are yielded together.

    Args:
        modules: All modules of a model.
        is_chosen: Returns whether a linear map is yielded.
    """
    linear = {m: None for m in modules if isinstance(m, Linear) and is_chosen(m)}
    for module in modules:
        names = module.same_input if isinstance(module, Module) else ()
        if same_input := [m for name in names if (m := getattr(module, name)) in linear]:
            yield same_input
        for m in same_input:
            del linear[m]
    yield from ([m] for m in linear)


def apply_packing[M: nnx.Module](model: M, packing: Packing, *, in_place: bool) -> M:
    """Returns a model with packed weights; see `packed` and `packed_quantized`.

    Args:
        model: The model.
        packing: The weights that are packed.
        in_place: Whether each weight may be freed once it is packed.
    """
    model = packed_quantized(model, in_place=in_place) if packing.quantized else model
    return packed(model, in_place=in_place) if packing.floats else model


def flatten[M: nnx.Module](model: M) -> tuple[FlatModel[M], list[Any], list[Split]]:
    """Returns a model without weights, its weights, and how each weight is divided among devices."""
    graphdef, state = nnx.split(model)
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    splits = [v.get_metadata().get("split", (None,) * v.get_raw_value().ndim) for v in variables]
    leaves, treedef = jax.tree.flatten(state)
    assert len(leaves) == len(splits), "the number of splits differs from the number of weights"
    return FlatModel(graphdef, treedef), leaves, splits


def outline_of[M: nnx.Module](model: M) -> M:
    """Returns a model with shapes in place of weights. The shapes are those in the checkpoint."""
    flat, weights, splits = flatten(model)
    shapes = [whole_shape(x.shape, split) for x, split in zip(weights, splits, strict=True)]
    return flat.merge([jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, weights, strict=True)])


def placed(
    weights: Sequence[Any], splits: Sequence[Split], grid: DeviceGrid, *, are_in_order: bool
) -> list[Array]:
    """Returns weights on the devices of a grid.

    Args:
        weights: The weights, with columns in the order of the checkpoint or of the devices.
        splits: How each weight is divided among devices.
        grid: The devices.
        are_in_order: Whether columns are in the order of the devices, as in weights from `load`.
    """
    if not are_in_order:
        columns = [grid.columns(split) for split in splits]
        weights = [
            weight if all(c is None for c in cs) else take_columns(np.asarray(weight), cs)
            for weight, cs in zip(weights, columns, strict=True)
        ]
    return jax.device_put(list(weights), [grid.sharding(split) for split in splits])


class ServedWeights:
    """The weights with which programs are called. They can be replaced without compiling programs again.

    Args:
        model: The model.
        owns_weights: Whether the engine owns the weights, so that it may pack them in place and free them.
            Otherwise they remain the caller's, who may continue to train the model.
        packing: The weights that are packed.
        quantized_dtype: The type to which float weights are quantized; None for no quantization.
        grid: The devices that divide the weights. Weights that the engine owns are on these devices already.
        extra: Further arrays for programs, which follow the weights in the list. They are copied to every
            device.

    Attributes:
        model: The model without its weights.
        arrays: Weights and extra arrays; always the same list object. A freed weight is replaced by its
            shape.
        are_dropped: Whether the weights are neither on the device nor in host memory.
        owns_weights: Whether the engine owns the weights. If it does, `check` is not needed.
        is_packed: Whether all matrix products use packed weights.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        owns_weights: bool,
        packing: Packing,
        quantized_dtype: OnlineDtype | None,
        grid: DeviceGrid,
        extra: list[Any],
    ) -> None:
        given = jax.tree.leaves(nnx.state(model))
        self._outline = quantize_outline(outline_of(model), quantized_dtype)
        self._grid, self._packing = grid, packing
        self._quantized_dtype: OnlineDtype | None = quantized_dtype
        self.arrays: list[Any] = []
        self.owns_weights, self._watched = owns_weights, _watch(None if owns_weights else model)
        self._on_host: dict[int, np.ndarray] = {}  # weights in host memory, by index in `arrays`
        self._extra_on_host: dict[int, np.ndarray] = {}  # extra arrays in host memory, by index in `arrays`
        self.are_dropped = False
        callers_arrays = [] if owns_weights else given
        self.model, weights = self._flatten_and_place(model, callers_arrays, are_in_order=owns_weights)
        copies = jax.device_put([jnp.asarray(x) for x in extra], NamedSharding(grid.mesh, PartitionSpec()))
        self.arrays += [*weights, *copies]

    def replace(self, new: NewWeights, overrides: Mapping[str, Any]) -> None:
        """Serves new weights from the next step on. Arrays that are on a device are shared, not copied.

        Args:
            new: The new weights, see with_weights in models/loading/new_weights.py.
            overrides: Fields that replace those in config.json if `new` is a folder.

        Raises:
            ValueError: If the weights do not fit the model. The served weights are then unchanged.
        """
        if not isinstance(new, LanguageModel | nnx.State | Mapping | str | Path):
            new = dict(new)  # an iterable of pairs, which can be read only once
        # The new model must have the rotary positions of the served one, even if the engine's max_model_len
        # is lower.
        max_model_len = self._outline.config.max_position_embeddings
        model = with_weights(self._outline, new, max_model_len, overrides, self._grid, self._quantized_dtype)
        self.owns_weights = isinstance(new, str | Path)
        given = nnx.state(new) if isinstance(new, LanguageModel) else None if self.owns_weights else new
        old = [x for x, is_shared in zip(self.arrays, self._is_shared, strict=False) if not is_shared]
        flat, weights = self._flatten_and_place(model, jax.tree.leaves(given), are_in_order=self.owns_weights)
        assert flat.treedef == self.model.treedef, "the new weights have another structure"
        self.arrays[: len(weights)] = weights
        for array in old:
            if isinstance(array, jax.Array):
                array.delete()
        self._on_host, self.are_dropped = {}, False
        self._watched = _watch(new if isinstance(new, LanguageModel) else None)

    def check(self) -> None:
        """Raises RuntimeError if the caller's model no longer has the served weights.

        Raises:
            RuntimeError: If a parameter of the model was replaced, or an array was deleted.
        """
        if any(was_replaced() for was_replaced in self._watched):
            raise RuntimeError(
                "the weights of the model in memory were replaced, but the engine still serves the previous "
                "ones; call update_weights(model)"
            )
        arrays = [array for array in self.arrays if isinstance(array, jax.Array)]
        if not self.owns_weights and any(array.is_deleted() for array in arrays):
            raise RuntimeError(
                "served weights were deleted, probably because they were donated to a JAX program; call "
                "update_weights with the new weights"
            )

    def free(self, *, keeps_copy: bool) -> None:
        """Frees the weights that the engine owns.

        Programs must not run until `restore` or `replace` is called.

        Args:
            keeps_copy: Whether to copy the weights to host memory and to keep references to arrays shared
                with the caller. Otherwise `replace` must provide weights.
        """
        for i, is_shared in enumerate(self._is_shared):
            array = self.arrays[i]
            if keeps_copy and is_shared:
                continue
            if keeps_copy:
                self._on_host[i] = np.array(array)  # a copy, because the array is deleted below
            self.arrays[i] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            if not is_shared:
                array.delete()
        if not keeps_copy:
            self.are_dropped, self._watched = True, []

    def restore(self) -> None:
        """Restores the weights from host memory."""
        assert not self.are_dropped, "dropped weights cannot be restored"
        for i, array in self._on_host.items():
            self.arrays[i] = jax.device_put(array, self.arrays[i].sharding)
        self._on_host = {}

    def free_extra(self) -> None:
        """Moves the extra arrays to host memory. Programs must not run until `restore_extra` is called."""
        for i in range(len(self._is_shared), len(self.arrays)):
            array = self.arrays[i]
            self._extra_on_host[i] = np.array(array)
            # The array is not deleted because the caller may use it too.
            self.arrays[i] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)

    def restore_extra(self) -> None:
        """Restores the extra arrays from host memory."""
        for i, array in self._extra_on_host.items():
            self.arrays[i] = jax.device_put(array, self.arrays[i].sharding)
        self._extra_on_host = {}

    def close(self) -> None:
        """Frees the weights, except the caller's."""
        for i, array in enumerate(self.arrays):
            may_delete = not self._is_shared[i] if i < len(self._is_shared) else self.owns_weights
            if may_delete and isinstance(array, jax.Array):
                array.delete()
        self.arrays, self._watched, self._on_host = [], [], {}

    def _flatten_and_place(
        self, model: LanguageModel, callers_arrays: Collection[Any], *, are_in_order: bool
    ) -> tuple[FlatModel[LanguageModel], list[Array]]:
        """Returns a model without its weights, and the weights on the devices of the grid.

        It records which arrays are the caller's. Arrays that packing or quantization has replaced, and that
        are not the caller's, are deleted. Otherwise they would stay until the next garbage collection,
        because modules refer to each other.

        Args:
            model: The model.
            callers_arrays: Arrays that belong to the caller and must not be deleted.
            are_in_order: See `placed`.
        """
        before = jax.tree.leaves(nnx.state(model))
        model = quantize_model(model, self._quantized_dtype)
        before += jax.tree.leaves(nnx.state(model))
        model = apply_packing(model, self._packing, in_place=self.owns_weights)
        self.is_packed = _is_packed(model)
        flat, weights, splits = flatten(model)
        callers_ids, served_ids = {id(array) for array in callers_arrays}, {id(array) for array in weights}
        self._is_shared = [id(array) in callers_ids for array in weights]
        for array in before:
            if id(array) not in callers_ids | served_ids:
                array.delete()
        return flat, placed(weights, splits, self._grid, are_in_order=are_in_order)


def _is_packed(model: LanguageModel) -> bool:
    """Returns whether all linear maps, experts and the head of a model have packed weights."""
    kernels = [place.kernel for place in kernel_places(model)]
    if isinstance(head := model.head, Embedding) and model.is_last_stage:
        kernels.append(head.packed_head or head.embedding)
    return not any(isinstance(kernel, nnx.Param | QuantizedWeight) for kernel in kernels)


def _watch(model: LanguageModel | None) -> list[Callable[[], bool]]:
    """Returns functions that tell whether a module or a weight of a model in memory has been replaced."""

    def watch(attributes: dict[str, Any], name: str, item: nnx.Variable | nnx.Module) -> Callable[[], bool]:
        if isinstance(item, nnx.Module):
            return lambda: attributes.get(name) is not item
        array = item.get_raw_value()

        def was_replaced() -> bool:
            nonlocal array
            current = item.get_raw_value()
            if attributes.get(name) is item and current is not array and not array.is_deleted():
                # nnx.jit returns weights that a function has only read as new arrays with the same values.
                # These do not count as replaced.
                if current.dtype != array.dtype or not bool(jnp.array_equal(current, array)):
                    return True
                array = current
            return attributes.get(name) is not item or current is not array

        return was_replaced

    modules = [] if model is None else [module for _, module in nnx.iter_modules(model)]
    return [
        watch(vars(module), name, item)
        for module in modules
        for name, item in vars(module).items()
        if isinstance(item, nnx.Variable | nnx.Module)
    ]
