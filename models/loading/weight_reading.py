"""Comparing the tensors of a checkpoint with the weights of a model, and reading them onto devices."""

import dataclasses
import functools
import logging
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.families.eagle import EagleHead
from jax_paged.models.hf_format import WeightTable
from jax_paged.models.loading.stored_tensors import FLOAT_DTYPES, StoredTensor
from jax_paged.models.parallel.sharding import DeviceGrid
from jax_paged.models.quantization.online import quantize_file
from jax_paged.models.quantization.quantize import kernel_places
from jax_paged.models.quantization.quantized_linear import (
    QuantizationScheme,
    QuantizedArrays,
    QuantizedWeight,
)

NUM_LOADING_THREADS = 4

_LOGGER = logging.getLogger(__name__)
_LOG_INTERVAL_S = 1.0
# Prefix of the keys of a list of layers, and the index of a layer.
_LAYER = re.compile(r"((?:[a-z_]+\.)*?(?:layers?|h|blocks?)\.)(\d+)\.")
# Last part of the key of a module's weight in each checkpoint format.
_WEIGHT_NAMES = ("weight", "qweight", "weight_packed")
# Tensors that no family reads, under any prefix.
_UNUSED = re.compile(
    r"(.*\.)?("
    r"rotary_emb\.((original_)?inv_freq|cos_cached|sin_cached)|position_ids|"  # computed by the model
    r"v_head\..*|"  # used by TRL for training
    r"(q|k|v|kv|prob)_(scale|zero_point)|(q|k|v|kv|qkv)_proj\.output_scale"  # scales of a quantized KV cache
    r")"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A weight of a model, and its name in a checkpoint.

    Args:
        path: NNX path of the weight in the model's state.
        param: The parameter, or the QuantizedWeight.
        key: Key in the checkpoint. If it contains {}, the checkpoint has one tensor for each index of the
            first dimension.
        transposed: Whether the checkpoint stores the weight transposed.
    """

    path: tuple[Any, ...]
    param: Any  # an nnx.Param or a QuantizedWeight
    key: str
    transposed: bool

    @property
    def is_stack(self) -> bool:
        """Whether the weight is stored as several tensors, one per expert."""
        return "{}" in self.key

    @property
    def keys(self) -> list[str]:
        """The keys of the checkpoint's tensors."""
        return [self.key.format(i) for i in range(self.param.shape[0])] if self.is_stack else [self.key]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of each of the checkpoint's float tensors."""
        shape = self.param.shape[1:] if self.is_stack else self.param.shape
        return (*shape[:-2], *shape[:-3:-1]) if self.transposed else shape

    @property
    def expected(self) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """The shape and the allowed dtypes of each of the checkpoint's tensors, by key.

        The source of a scheme is a string if float tensors are quantized while they are read.
        """
        if self._scheme is None or isinstance(self._scheme.source, str):
            return {key: (self.stored_shape, tuple(FLOAT_DTYPES)) for key in self.keys}
        tensors = self._scheme.source.tensors(*self.param.shape[-2:])
        return {key.removesuffix("weight") + end: x for key in self.keys for end, x in tensors.items()}

    @property
    def _scheme(self) -> QuantizationScheme | None:
        return self.param.scheme if isinstance(self.param, QuantizedWeight) else None


def read_weights(
    model: LanguageModel | EagleHead,
    stored: dict[str, StoredTensor],
    dtype: jnp.dtype,
    folder: Path,
    grid: DeviceGrid | None = None,
) -> None:
    """Reads the weights of a model whose tensors have been checked.

    Args:
        model: A model with shapes in place of weights. The shapes are replaced by the weights.
        stored: The tensors of the checkpoint by key.
        dtype: The dtype of the model. It is used when float weights are quantized while they are read.
        folder: The checkpoint folder, for log messages.
        grid: The devices that share the weights; None for the default device.
    """
    weights = weights_of(model)
    # Largest weights first, so that their temporary copies are made while little else is allocated.
    weights.sort(key=lambda w: -w.param.size)
    start = logged = time.monotonic()
    flat, num_read, num_values = [], 0, sum(w.param.size for w in weights)
    # Reading a quantized weight needs temporary arrays that are several times as large as the result, so only
    # one is read at a time.
    has_quantized = any(isinstance(w.param, QuantizedWeight) for w in weights)
    with ThreadPoolExecutor(1 if has_quantized else NUM_LOADING_THREADS) as pool:
        values = pool.map(lambda w: jax.block_until_ready(_load(w, stored, dtype, grid)), weights)
        for w, value in zip(weights, values, strict=True):
            flat += value
            num_read += w.param.size
            if time.monotonic() - logged >= _LOG_INTERVAL_S:
                logged = time.monotonic()
                _LOGGER.info(
                    "read %.0f %% of the weights in %.0f s", 100 * num_read / num_values, logged - start
                )
    nnx.update(model, nnx.from_flat_state(flat))
    seconds, num_bytes = time.monotonic() - start, sum(x.get_raw_value().nbytes for _, x in flat)
    _LOGGER.info("read the weights of %s: %.0f MiB in %.1f s", folder, num_bytes / 2**20, seconds)


def weights_of(model: LanguageModel | EagleHead) -> list[Weight]:
    """Returns the weights of a model with their names in a checkpoint.

    Args:
        model: The model, or its outline.
    """
    found: list[tuple[Any, Any]] = list(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    found += [(p.path, p.kernel) for p in kernel_places(model) if isinstance(p.kernel, QuantizedWeight)]
    return [weight_at(model, path, param) for path, param in found]


def weight_at(model: LanguageModel | EagleHead, path: tuple[Any, ...], param: Any) -> Weight:
    """Returns one weight of a model with its name in a checkpoint.

    Args:
        model: The model, which has the weight table.
        path: NNX path of the weight.
        param: The parameter or QuantizedWeight at that path.
    """
    return Weight(path, param, *model.weight_table.hf_key(".".join(map(str, path))))


def _load(
    weight: Weight, stored: dict[str, StoredTensor], dtype: jnp.dtype, grid: DeviceGrid | None
) -> list[tuple[tuple[Any, ...], nnx.Variable]]:
    """Returns the variables of a weight with their paths. A quantized weight has several variables."""
    kernel = weight.param
    if not isinstance(kernel, QuantizedWeight):
        return [(weight.path, kernel.replace(_load_weight(weight, stored, grid)))]
    found = kernel.to_devices(_read_arrays(weight, kernel.scheme, stored, dtype), grid)
    return [((*weight.path, name), getattr(kernel, name).replace(part)) for name, part in found.items()]


def _read_arrays(
    weight: Weight, scheme: QuantizationScheme, stored: dict[str, StoredTensor], dtype: jnp.dtype
) -> QuantizedArrays:
    shape = weight.param.shape

    def read(key: str) -> QuantizedArrays:
        source = scheme.source
        if isinstance(source, str):
            kernel = stored[key].read()
            return quantize_file(kernel.mT if weight.transposed else kernel, dtype, source)
        stem = key.removesuffix("weight")
        tensors = {end: stored[stem + end].read() for end in source.tensors(*shape[-2:])}
        try:
            return source.arrays(tensors)
        except ValueError as error:
            raise ValueError(f"{stem}* can't be read: {error}") from error

    parts = [read(key) for key in weight.keys]
    found = jax.tree.map(lambda *x: np.stack(x), *parts) if weight.is_stack else parts[0]
    shapes, expected = (jax.tree.map(lambda x: x.shape, x) for x in (found, scheme.shapes(shape)))
    if shapes != expected:
        raise ValueError(
            f"the arrays of {weight.key} must have the shapes {expected} by config.json, got {shapes}"
        )
    return found


def _load_weight(weight: Weight, stored: dict[str, StoredTensor], grid: DeviceGrid | None) -> Array:
    dtype = weight.param.dtype
    if grid is not None and grid.num_devices > 1:
        return _load_divided(weight, stored, dtype, grid)
    device = None if grid is None else grid.devices[0]
    parts = [_place(stored[key].read(), weight.transposed, dtype, device) for key in weight.keys]
    return jnp.stack(parts) if weight.is_stack else parts[0]


def _load_divided(
    weight: Weight, stored: dict[str, StoredTensor], dtype: jnp.dtype, grid: DeviceGrid
) -> Array:
    """Reads a weight that is divided among devices; each device gets only its own part."""
    split = weight.param.get_metadata()["split"]
    columns = grid.columns(split)
    whole = [np.arange(n) if c is None else c for n, c in zip(weight.param.shape, columns, strict=True)]

    def read(index: tuple[slice, ...]) -> np.ndarray:
        own = [c[part] for c, part in zip(whole, index, strict=True)]
        keys = [weight.keys[i] for i in own.pop(0)] if weight.is_stack else weight.keys
        own = [*own[:-2], *own[:-3:-1]] if weight.transposed else own
        read_parts = [stored[key].read_columns(own) for key in keys]
        parts = [(part.mT if weight.transposed else part).astype(dtype) for part in read_parts]
        return np.stack(parts) if weight.is_stack else parts[0]

    return jax.make_array_from_callback(tuple(map(len, whole)), grid.sharding(split), read)


def _place(value: np.ndarray, transposed: bool, dtype: jnp.dtype, device: jax.Device | None) -> Array:
    if transposed and jax.default_backend() == "cpu":
        value, transposed = value.mT, False  # transposing during the copy is many times faster than later
    # Never alias the mapped file: its pages would stay in memory, and the file may change.
    placed = jax.device_put(value, device, may_alias=False)
    return _convert(placed, transposed, dtype) if transposed or placed.dtype != dtype else placed


@functools.partial(jax.jit, static_argnums=(1, 2))
def _convert(value: Array, transposed: bool, dtype: jnp.dtype) -> Array:
    return (value.mT if transposed else value).astype(dtype)


@dataclasses.dataclass(frozen=True)
class StoredCheck:
    """Result of comparing the tensors of a checkpoint with the weights of a model.

    Args:
        problems: One line for each tensor that is missing, unexpected, or of the wrong shape or dtype.
        unused: Keys of tensors that no model reads; see `is_unused`.
    """

    problems: list[str]
    unused: list[str]


def check_stored(stored: dict[str, StoredTensor], weights: list[Weight], table: WeightTable) -> StoredCheck:
    """Compares the tensors of a checkpoint with the weights of a model, using the headers of the files.

    The data of copies of tied weights and of unexpected biases is read, because these are allowed only with
    certain values. No other data is read.

    Args:
        stored: The tensors of the checkpoint by key.
        weights: The weights of the model.
        table: The weight table of the model.
    """
    expected = {key: x for weight in weights for key, x in weight.expected.items()}
    problems, unused = list[str](), list[str]()
    for key, (shape, dtypes) in expected.items():
        tensor = stored.get(key)
        if tensor is None:
            untied = ", and config.json does not tie it to another weight" if key in table.tied else ""
            problems.append(f"{key} is missing{untied}")
            continue
        if tensor.shape != shape:
            problems.append(f"{key} must have shape {shape} by config.json, got {tensor.shape}")
        if tensor.dtype not in dtypes:
            problems.append(f"{key} must be of type {', '.join(dtypes)}, got {tensor.dtype}")
    last_layers = last_layers_of(expected)
    for key in stored.keys() - expected.keys():
        tensor, kept = stored[key], table.tied.get(key)
        if kept in expected and kept in stored:
            readable = {tensor.dtype, stored[kept].dtype} <= FLOAT_DTYPES.keys()
            if not readable or not np.array_equal(tensor.read(), stored[kept].read()):
                problems.append(f"{key} differs from {kept}, although config.json ties them")
        elif not re.fullmatch(table.ignored, key):
            adds_nothing = is_added_bias(key, expected) and tensor.dtype in FLOAT_DTYPES
            if is_unused(key, table, last_layers) or (adds_nothing and not tensor.read().any()):
                unused.append(key)
            else:
                problems.append(f"{key} is unexpected")
    return StoredCheck(problems, unused)


def raise_problems(summary: str, problems: Iterable[str]) -> None:
    """Raises a ValueError that lists some problems, if there are any.

    Args:
        summary: The first line of the message.
        problems: One line each.
    """
    lines = "".join(f"\n  {problem}" for problem in sorted(problems))
    if lines:
        raise ValueError(f"{summary}:{lines}")


def last_layers_of(keys: Iterable[str]) -> dict[str, int]:
    """Returns the highest layer index for each prefix of a list of layers, such as "model.layers.".

    Args:
        keys: Keys of weights.
    """
    last: dict[str, int] = {}
    for key in keys:
        if match := _LAYER.match(key):
            last[match[1]] = max(int(match[2]), last.get(match[1], 0))
    return last


def is_unused(key: str, table: WeightTable, last_layers: Mapping[str, int]) -> bool:
    """Returns whether a tensor that is not a weight of the model can be ignored, as transformers does.

    This is the case for buffers that the model computes itself, for scales of a quantized KV cache, for heads
    of other tasks, and for layers after the last one, such as multi-token prediction layers.

    Args:
        key: Key of the tensor.
        table: The weight table of the model.
        last_layers: The model's highest layer indices, as returned by `last_layers_of`.
    """
    if re.fullmatch(table.unused, key) or _UNUSED.fullmatch(key):
        return True
    match = _LAYER.match(key)
    return match is not None and int(match[2]) > last_layers.get(match[1], int(match[2]))


def without_numbers(keys: Iterable[str]) -> str:
    """Returns a short list of keys for a message.

    Keys that differ only in the indices of layers and experts are listed once, with a count.

    Args:
        keys: The keys.
    """
    counts = Counter(re.sub(r"(?<![^.])\d+(?![^.])", "*", key) for key in keys)
    return ", ".join(f"{key} ({n})" if n > 1 else key for key, n in sorted(counts.items()))


def is_added_bias(key: str, expected: Collection[str]) -> bool:
    """Returns whether a tensor is the bias of a module that has no bias in the model.

    Such a tensor can be ignored if it is zero. For example, AutoGPTQ adds a bias to every linear map.

    Args:
        key: Key of the tensor.
        expected: Keys of the model's weights.
    """
    stem, _, end = key.rpartition(".")
    return end == "bias" and any(f"{stem}.{name}" in expected for name in _WEIGHT_NAMES)
