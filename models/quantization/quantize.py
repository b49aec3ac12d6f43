"""Quantization of float weights while a model is loaded, and the selection of weights that are quantized.

The weight matrices of linear maps and experts are quantized. The output head, routers, embeddings and all
other weights remain floats.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.layers import Linear
from jax_paged.models.moe import Experts
from jax_paged.models.quantization.online import quantize
from jax_paged.models.quantization.quantized_linear import (
    INT4_GROUP_SIZES,
    ONLINE_DTYPES,
    OnlineDtype,
    QuantizationScheme,
    QuantizedWeight,
)

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

    Args:
        model: The model, or its outline.
    """
    return list(_kernel_places(model))


def _kernel_places(model: nnx.Module) -> Iterator[KernelPlace]:
    for parts, module in nnx.iter_modules(model):
        names = ("kernel",) if isinstance(module, Linear) else getattr(module, "kernel_names", ())
        for name in names:
            yield KernelPlace((*parts, name), module, name)


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


def quantize_outline[M: LanguageModel](model: M, target: OnlineDtype | None) -> M:
    """Returns an outline with the shapes that `quantize_model` would produce.

    Args:
        model: A model with shapes in place of weights; it is modified.
        target: The type to quantize to; None leaves the model as it is.
    """
    if target is None:
        return model
    paths = {place.path for place in _online_places(model)}

    def scheme_of(place: KernelPlace) -> QuantizationScheme | None:
        return QuantizationScheme.online(target, place.kernel.shape[-2]) if place.path in paths else None

    apply_schemes(model, scheme_of)
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
    for place in list(_online_places(model)):
        param = place.kernel
        split, kernel = param.get_metadata()["split"], param[...]
        scheme = QuantizationScheme.online(target, kernel.shape[-2])
        weight = QuantizedWeight(scheme, kernel.shape, split, quantize(kernel, target))
        setattr(place.owner, place.name, weight)
    log_other_types(model, target)
    return model


def log_other_types(model: nnx.Module, target: OnlineDtype) -> None:
    """Logs which weights were quantized to another type than requested, if there are any.

    Args:
        model: A quantized model, or its outline.
        target: The requested type.
    """
    kernels = [(p.path, p.kernel) for p in kernel_places(model) if isinstance(p.kernel, QuantizedWeight)]
    other = [(".".join(map(str, path)), k) for path, k in kernels if k.scheme.source != target]
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
            shape = jax.ShapeDtypeStruct(kernel.shape, dtype)
            setattr(place.owner, place.name, nnx.Param(shape, split=kernel.split))
    return model


def _online_places(model: nnx.Module) -> Iterator[KernelPlace]:
    """Yields the locations of the float weights that are quantized while a model is loaded."""
    head = model.head if isinstance(model, LanguageModel) else None
    for place in kernel_places(model):
        # Routers, a subclass of Linear, are excluded: they are small, and a rounding error in them can select
        # other experts.
        is_quantizable = isinstance(place.owner, Experts) or type(place.owner) is Linear
        if is_quantizable and place.owner is not head and isinstance(place.kernel, nnx.Param):
            yield place
