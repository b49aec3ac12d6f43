"""Quantization of float weights while a model is loaded, and the selection of weights that are quantized.

The weight matrices of linear maps and experts are quantized. The output head is quantized to 8 bits, with the
embedding table if the two are tied, if the native CPU backend can multiply by it and look up its columns.
Routers, other embeddings and all other weights remain floats.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.layers import Embedding, Linear
from jax_paged.models.moe import Experts
from jax_paged.models.parallel.sharding import Split
from jax_paged.models.quantization.online import quantize
from jax_paged.models.quantization.quantized_linear import (
    INT4_GROUP_SIZES,
    ONLINE_DTYPES,
    OnlineDtype,
    QuantizationScheme,
    QuantizedWeight,
)
from jax_paged.pallas_kernels.native import quantized_products

_LOGGER = logging.getLogger(__name__)


class KernelPlace(NamedTuple):
    """Location of a weight matrix in a model.

    Args:
        path: NNX path of the matrix in the model's state.
        owner: The module that has the matrix.
        name: Name of the attribute of `owner`.
    """

    path: tuple[Any, ...]
    owner: nnx.Module
    name: str

    @property
    def kernel(self) -> Any:
        """The weight matrix: an nnx.Param or a QuantizedWeight."""
        return getattr(self.owner, self.name)


def kernel_places(model: nnx.Module) -> list[KernelPlace]:
    """Returns the locations of the weight matrices of all linear maps, experts and latent projections (MLA).

    Embedding tables are included if they are quantized. A quantized table is a matrix whose columns are the
    vectors; its shape is the reverse of the shape of a float table.

    Args:
        model: The model, or its outline.
    """
    return list(_kernel_places(model))


def _kernel_places(model: nnx.Module) -> Iterator[KernelPlace]:
    for parts, module in nnx.iter_modules(model):
        names = ("kernel",) if isinstance(module, Linear) else getattr(module, "kernel_names", ())
        for name in names:
            yield KernelPlace((*parts, name), module, name)
        if isinstance(module, Embedding) and isinstance(module.embedding, QuantizedWeight):
            yield KernelPlace((*parts, "embedding"), module, "embedding")


def choose_online_dtype(models: Sequence[nnx.Module], quantization: str | None) -> OnlineDtype | None:
    """Returns the type that float weights are quantized to; None if the checkpoint is quantized already.

    It is also None if no quantization is requested.

    Args:
        models: Models, or outlines, that share a checkpoint.
        quantization: The engine argument `quantization`.
    """
    kernels = (place.kernel for model in models for place in kernel_places(model))
    if any(isinstance(k, QuantizedWeight) and not isinstance(k.scheme.source, str) for k in kernels):
        return None
    return next((target for target in ONLINE_DTYPES if target == quantization), None)


def has_quantized(models: Sequence[nnx.Module], online: OnlineDtype | None) -> bool:
    """Returns whether models have quantized weights once they are loaded.

    Args:
        models: Models, or outlines.
        online: The type that float weights are quantized to; None if they are not.
    """
    kernels = (place.kernel for model in models for place in kernel_places(model))
    return online is not None or any(isinstance(kernel, QuantizedWeight) for kernel in kernels)


def apply_schemes(model: nnx.Module, scheme_of: Callable[[KernelPlace], QuantizationScheme | None]) -> None:
    """Replaces the shapes of float weights in an outline by the shapes of quantized weights.

    Args:
        model: A model with shapes in place of weights; it is modified.
        scheme_of: Returns the scheme of a weight, or None if the weight remains as it is.
    """
    for place in kernel_places(model):
        param = place.kernel
        if isinstance(param, nnx.Param) and (scheme := scheme_of(place)) is not None:
            kernel = QuantizedWeight(scheme, param.shape, param.get_metadata()["split"])
            setattr(place.owner, place.name, kernel)


def apply_table_schemes(
    model: LanguageModel, scheme_of: Callable[[KernelPlace], QuantizationScheme | None]
) -> None:
    """Replaces the shapes of embedding tables in an outline as `apply_schemes` does for weight matrices.

    Tables remain floats unless the native CPU backend can look up their columns.

    Args:
        model: A model with shapes in place of weights; it is modified.
        scheme_of: See `apply_schemes`.
    """
    if not _packs_tables():
        return
    for parts, module in list(nnx.iter_modules(model)):
        place = KernelPlace((*parts, "embedding"), module, "embedding")
        if type(module) is Embedding and (scheme := scheme_of(place)) is not None:
            module.embedding = QuantizedWeight(scheme, *_matrix_of(place))


def _packs_tables() -> bool:
    """Returns whether the native CPU backend can look up columns of quantized tables."""
    return jax.default_backend() == "cpu" and quantized_products.problem() is None


def quantize_outline[M: LanguageModel](model: M, target: OnlineDtype | None) -> M:
    """Returns an outline with the shapes that `quantize_model` would produce.

    Args:
        model: A model with shapes in place of weights; it is modified.
        target: The type to quantize to; None leaves the model as it is.
    """
    if target is None:
        return model
    for place, scheme in list(_online_places(model, target)):
        shape, split = _matrix_of(place)
        setattr(place.owner, place.name, QuantizedWeight(scheme, shape, split))
    return model


def quantize_model[M: nnx.Module](model: M, target: OnlineDtype | None) -> M:
    """Returns a copy of a model with quantized weights. All weights that are not quantized are shared.

    Args:
        model: A model with weights; not modified.
        target: The type to quantize to; if it is None, `model` itself is returned.
    """
    if target is None:
        return model
    model = nnx.merge(*nnx.split(model))
    for place, scheme in list(_online_places(model, target)):
        shape, split = _matrix_of(place)
        kernel = place.kernel[...].T if isinstance(place.owner, Embedding) else place.kernel[...]
        arrays = quantize(kernel, scheme.online_dtype)
        setattr(place.owner, place.name, QuantizedWeight(scheme, shape, split, arrays))
    log_other_types(model, target)
    return model


def log_other_types(model: nnx.Module, target: OnlineDtype) -> None:
    """Logs which weights were quantized to another type than requested, if there are any.

    Args:
        model: A quantized model, or its outline.
        target: The requested type.
    """
    kernels = [(p.path, p.kernel) for p in kernel_places(model) if isinstance(p.kernel, QuantizedWeight)]
    is_int4 = target == "int4"
    other = [
        (".".join(map(str, path)), k) for path, k in kernels if is_int4 and k.shape[-2] % INT4_GROUP_SIZES[-1]
    ]
    if other:
        path, kernel = other[0]
        _LOGGER.warning(
            "%d weights are quantized to %s, not to %s, because their rows are not multiples of %d, "
            "for example %s with %d rows",
            *(len(other), kernel.scheme.source, target, INT4_GROUP_SIZES[-1], path, kernel.shape[-2]),
        )


def float_outline[M: nnx.Module](model: M, dtype: jax.typing.DTypeLike) -> M:
    """Returns the outline that a model had before its weights were quantized by `quantize_model`.

    Args:
        model: A model, or its outline; not modified.
        dtype: The dtype of the float weights.

    Raises:
        ValueError: If the weights are quantized in the checkpoint.
    """
    model = nnx.merge(*nnx.split(model))
    for place in kernel_places(model):
        kernel = place.kernel
        if isinstance(kernel, QuantizedWeight):
            if not isinstance(kernel.scheme.source, str):
                raise ValueError(
                    "the weights must be the folder or hub id of a checkpoint of the same format because the "
                    "model is served from a quantized checkpoint, got a model or tensors"
                )
            shape, split = kernel.shape, kernel.split
            if isinstance(place.owner, Embedding):
                shape, split = shape[::-1], split[::-1]
            param = nnx.Param(jax.ShapeDtypeStruct(shape, dtype), split=split)
            setattr(place.owner, place.name, param)
    return model


def _online_places(
    model: nnx.Module, target: OnlineDtype
) -> Iterator[tuple[KernelPlace, QuantizationScheme]]:
    """Yields the locations and schemes of the float weights that are quantized while a model is loaded."""
    head = model.head if isinstance(model, LanguageModel) else None
    for place in kernel_places(model):
        # Routers, a subclass of Linear, are excluded: they are small, and a rounding error in them can select
        # other experts.
        is_quantizable = isinstance(place.owner, Experts) or type(place.owner) is Linear
        if is_quantizable and place.owner is not head and isinstance(place.kernel, nnx.Param):
            yield place, QuantizationScheme.online(target, place.kernel.shape[-2])
    if target == "fp8" or not _packs_tables():
        return
    # Errors of 4 bits in the head would change more tokens than those in other weights.
    for parts, module in nnx.iter_modules(model):
        name = "embedding" if type(module) is Embedding else "kernel"
        if module is head and isinstance(getattr(head, name, None), nnx.Param):
            place = KernelPlace((*parts, name), module, name)
            yield place, QuantizationScheme.online("int8", _matrix_of(place)[0][0])


def _matrix_of(place: KernelPlace) -> tuple[tuple[int, ...], Split]:
    """Returns the shape and the split that a float weight has as a quantized matrix."""
    shape, split = place.kernel.shape, place.kernel.get_metadata()["split"]
    return (shape[::-1], split[::-1]) if isinstance(place.owner, Embedding) else (shape, split)
