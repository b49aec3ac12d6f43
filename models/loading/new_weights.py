"""Replacement of a model's weights, in any of the forms in which a training loop holds them."""

import dataclasses
import re
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jax_paged.arguments.shown_values import shown
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.checkpoint import resolve_model_dir
from jax_paged.models.loading.stored_tensors import with_prefix
from jax_paged.models.loading.weight_reading import (
    Weight,
    is_added_bias,
    is_unused,
    last_layers_of,
    raise_problems,
    weights_of,
)
from jax_paged.models.parallel.sharding import DeviceGrid
from jax_paged.models.quantization.quantize import float_outline, kernel_places
from jax_paged.models.quantization.quantized_linear import QuantizedWeight
from jax_paged.models.weights import load_model, outline

# A model, its state, tensors by their keys in a checkpoint, or the folder or hub id of a checkpoint.
NewWeights = LanguageModel | nnx.State | Mapping[str, Any] | Iterable[tuple[str, Any]] | str | Path


def with_weights(
    served: LanguageModel,
    new: NewWeights,
    max_model_len: int,
    overrides: Mapping[str, Any] = types.MappingProxyType({}),
    grid: DeviceGrid | None = None,
    quantization: str | None = None,
) -> LanguageModel:
    """Returns a model of the same structure with other weights.

    Arrays that are already on a device are shared, not copied.

    Args:
        served: The model that is served, or its outline. Its weights may have been quantized while they were
            loaded.
        new: A model, its nnx.State, tensors by their keys in a checkpoint (a mapping or pairs), or the folder
            or hub id of a checkpoint.
        max_model_len: For a folder; see `load_model`.
        overrides: For a folder; see `load_model`.
        grid: For a folder; see `load_model`.
        quantization: For a folder; see `load_model`. Weights that are not read from a folder are returned as
            floats.

    Raises:
        ValueError: If the weights and `served` differ in names, shapes or dtypes. The message lists every
            problem.
    """
    dtype = jax.tree.leaves(nnx.state(served, nnx.Param))[0].dtype
    if isinstance(new, str | Path):
        folder = resolve_model_dir(str(new)), dtype.name, max_model_len, overrides
        new_outline = outline(*folder, quantization)  # checked before any weight is read
        _check_same_config(served, new_outline)
        _check_same_schemes(served, new_outline)
        return load_model(*folder, grid, quantization).model
    served = float_outline(served, dtype)
    weights = weights_of(served)
    if isinstance(new, LanguageModel):
        _check_same_config(served, new)
        new = nnx.state(new, nnx.Param)
    problems: list[str] = []
    if isinstance(new, nnx.State):
        values = {".".join(map(str, path)): value for path, value in nnx.to_flat_state(new)}
        raw = {k: v.get_raw_value() if isinstance(v, nnx.Variable) else v for k, v in values.items()}
        found = [_take(raw, ".".join(map(str, w.path)), w.param.shape, w, problems) for w in weights]
    else:
        raw = with_prefix(dict(new.items() if isinstance(new, Mapping) else new), served.weight_table)
        found = [_assemble(raw, w, problems) for w in weights]
        _take_extra(raw, served, found, weights, problems)
    problems += [f"{name} is unexpected" for name in raw]
    raise_problems("the weights do not fit the served model", problems)
    graphdef, state = nnx.split(served)
    # New variables are created because the model would otherwise share variables with `served`, whose weights
    # could then not be freed.
    flat = dict(nnx.to_flat_state(state))
    flat |= {w.path: w.param.replace(x) for w, x in zip(weights, found, strict=True)}
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _check_same_config(served: LanguageModel, new: LanguageModel) -> None:
    """Raises a ValueError unless two models have the same class and the same config."""
    given, ours = type(new).__name__, type(served).__name__
    if type(new) is not type(served):
        raise ValueError(f"the weights must be those of a {ours}, the served model, got a {given}")
    fields = [field.name for field in dataclasses.fields(served.config)]
    pairs = [(name, getattr(new.config, name), getattr(served.config, name)) for name in fields]
    other = "".join(f"\n  `{name}` must be {shown(b)}, got {shown(a)}" for name, a, b in pairs if a != b)
    if other:
        raise ValueError(f"the weights are those of a {given} with a different config:{other}")


def _check_same_schemes(served: LanguageModel, new: LanguageModel) -> None:
    """Raises a ValueError unless the same weights are quantized in the same format in both models."""

    def forms(model: LanguageModel) -> dict[str, str]:
        places = [(".".join(map(str, p.path)), p.kernel) for p in kernel_places(model)]
        return {path: repr(k.scheme if isinstance(k, QuantizedWeight) else None) for path, k in places}

    ours = forms(served)
    other = [path for path, form in forms(new).items() if form != ours[path]]
    if other:
        raise ValueError(
            "the weights must be quantized like those of the served model, got another format for "
            f"{', '.join(other[:3])}{' ...' * (len(other) > 3)}"
        )


def _take(
    raw: dict[str, Any], name: str, shape: tuple[int, ...], weight: Weight, problems: list[str]
) -> Array | None:
    """Removes a tensor from `raw` and returns it; notes a problem and returns None if it does not fit."""
    if name not in raw:
        problems.append(f"{name} is missing")
        return None
    value, dtype = raw.pop(name), weight.param.dtype
    if not isinstance(value, jax.Array):
        value = np.asarray(value)
    if value.shape != shape:
        problems.append(f"{name} must have shape {shape}, got {value.shape}")
    elif value.dtype != dtype:
        problems.append(f"{name} must be of type {dtype}, got {value.dtype}")
    elif isinstance(value, jax.Array) and value.is_deleted():
        problems.append(f"{name} is deleted because it was donated to a jitted function; pass a copy")
    else:
        # Never alias memory that the caller may write to.
        return value if isinstance(value, jax.Array) else jnp.array(value)
    return None


def _assemble(raw: dict[str, Any], weight: Weight, problems: list[str]) -> Array | None:
    """Returns a weight that is put together from the checkpoint's tensors; None if there is a problem."""
    parts = [_take(raw, key, weight.stored_shape, weight, problems) for key in weight.keys]
    whole = [part.mT if weight.transposed else part for part in parts if part is not None]
    if len(whole) < len(parts):
        return None
    return jnp.stack(whole) if weight.is_stack else whole[0]


def _take_extra(
    raw: dict[str, Any],
    served: LanguageModel,
    found: list[Array | None],
    weights: list[Weight],
    problems: list[str],
) -> None:
    """Removes from `raw` the tensors that a checkpoint may have in addition to the weights.

    These are copies of tied weights, which must be equal to the weights, and tensors that are not used.
    """
    table, by_key = served.weight_table, {w.key: x for w, x in zip(weights, found, strict=True)}
    expected = {key for w in weights for key in w.keys}
    last_layers = last_layers_of(expected)
    for key in list(raw):
        is_spare = re.fullmatch(table.ignored, key) or is_unused(key, table, last_layers)
        if is_spare or (is_added_bias(key, expected) and not np.asarray(raw[key]).any()):
            del raw[key]
            continue
        kept = by_key.get(table.tied.get(key, ""))
        if kept is not None and not np.array_equal(np.asarray(raw.pop(key)), np.asarray(kept)):
            problems.append(f"{key} differs from {table.tied[key]}, although the model ties them")
