"""Quantization of a model on the fly, and which of its weights are quantized.

Linear maps and experts are; the head, the router and embeddings stay as they are, as everything else does.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.layers import Linear
from jax_paged.models.moe import Experts
from jax_paged.models.quantization.quantized_linear import (
    KIND_DTYPES,
    Kind,
    QuantizationScheme,
    QuantizedWeight,
    quantize,
)


class KernelPlace(NamedTuple):
    """Where a kernel stands in a model.

    Args:
        path: Of the kernel in the model's state.
        owner: The module that has it.
        name: Of its attribute there.
    """

    path: tuple[Any, ...]
    owner: nnx.Module
    name: str

    @property
    def kernel(self) -> Any:
        """The kernel: a parameter, or a QuantizedWeight."""
        return getattr(self.owner, self.name)


def kernel_places(model: nnx.Module) -> list[KernelPlace]:
    """Returns the kernels of all linear maps, experts and maps of latents."""
    return list(_kernel_places(model))


def _kernel_places(model: nnx.Module) -> Iterator[KernelPlace]:
    for parts, module in nnx.iter_modules(model):
        names = ("kernel",) if isinstance(module, Linear) else getattr(module, "kernel_names", ())
        for name in names:
            yield KernelPlace((*parts, name), module, name)


def kind_to_make(models: Sequence[nnx.Module], quantization: str | None) -> Kind | None:
    """Returns the type that float kernels are quantized to on the fly; None if the checkpoint is quantized.

    Args:
        models: Those that share a checkpoint; weights, or shapes in their places.
        quantization: As EngineArgs has it.
    """
    kernels = (place.kernel for model in models for place in kernel_places(model))
    if any(isinstance(k, QuantizedWeight) and not isinstance(k.form.source, str) for k in kernels):
        return None
    return next((kind for kind in KIND_DTYPES if kind == quantization), None)


def outline_quantized(model: nnx.Module, form_of: Callable[[KernelPlace], QuantizationScheme | None]) -> None:
    """Puts the shapes of quantized weights in the places of float ones, in a model without weights.

    Args:
        model: Has shapes in place of its weights; modified.
        form_of: The form of each kernel; None leaves it as it is.
    """
    for place in kernel_places(model):
        param = place.kernel
        if isinstance(param, nnx.Param) and (form := form_of(place)) is not None:
            kernel = QuantizedWeight(form, param.shape, param.get_metadata()["split"])
            setattr(place.owner, place.name, kernel)


def outline_kind[M: LanguageModel](model: M, kind: Kind | None) -> M:
    """Returns a model without weights, which now has the shapes of what `quantized` would make of it."""
    if kind is None:
        return model
    made = {place.path for place in _made(model)}

    def form_of(place: KernelPlace) -> QuantizationScheme | None:
        return QuantizationScheme.of_kind(kind, place.kernel.shape[-2]) if place.path in made else None

    outline_quantized(model, form_of)
    return model


def quantized[M: nnx.Module](model: M, kind: Kind | None) -> M:
    """Returns a copy of a model with quantized kernels that shares all else; the model itself for None."""
    if kind is None:
        return model
    model = nnx.merge(*nnx.split(model))
    for place in _made(model):
        param = place.kernel
        split, kernel = param.get_metadata()["split"], param[...]
        form = QuantizationScheme.of_kind(kind, kernel.shape[-2])
        setattr(place.owner, place.name, QuantizedWeight(form, kernel.shape, split, quantize(kernel, kind)))
    return model


def float_outline[M: nnx.Module](model: M, dtype: jax.typing.DTypeLike) -> M:
    """Returns a model without weights, as it was before `quantized`.

    Raises:
        ValueError: If its checkpoint holds quantized weights.
    """
    model = nnx.merge(*nnx.split(model))
    for place in kernel_places(model):
        kernel = place.kernel
        if isinstance(kernel, QuantizedWeight):
            if not isinstance(kernel.form.source, str):
                raise ValueError(
                    "the weights are a model's or tensors; allowed for a model that is served from a "
                    "quantised checkpoint: the folder or hub id of another of the same format"
                )
            shape = jax.ShapeDtypeStruct(kernel.shape, dtype)
            setattr(place.owner, place.name, nnx.Param(shape, split=kernel.split))
    return model


def _made(model: nnx.Module) -> Iterator[KernelPlace]:
    """Yields the float kernels that are quantized on the fly."""
    head = model.head if isinstance(model, LanguageModel) else None
    for place in kernel_places(model):
        # Routers are a subclass: they are small, and a little noise there chooses other experts.
        is_made = isinstance(place.owner, Experts) or type(place.owner) is Linear
        if is_made and place.owner is not head and isinstance(place.kernel, nnx.Param):
            yield place
