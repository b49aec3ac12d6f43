"""Loads and saves checkpoint folders: Hugging Face layout, safetensors only."""

import dataclasses
import functools
import json
import logging
import re
import time
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array
from safetensors.numpy import save_file

from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.checkpoint import end_token_ids, read_generation_config, read_json, sampling_defaults
from jax_paged.models.eagle import EagleHead
from jax_paged.models.hf_format import WeightTable
from jax_paged.models.mxfp4 import with_decoded
from jax_paged.models.registry import get_architecture, get_model_class
from jax_paged.models.sharding import DeviceGrid
from jax_paged.models.stages import split_model
from jax_paged.models.stored_tensors import (
    STORED_DTYPES,
    StoredTensor,
    read_headers,
    with_prefix,
)

NUM_LOADING_THREADS = 4

_LOGGER = logging.getLogger(__name__)
_LOG_INTERVAL_S = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model on the device, and what the engine needs to know about it.

    Args:
        model: The Flax module; owns the weights.
        config: The family's config, such as LlamaConfig.
        architecture: The name under "architectures" in config.json.
        dtype: Of weights and activations: float32 or bfloat16.
        weight_bytes: Bytes of all weights.
        max_model_len: Maximum tokens of a text.
        vocab_size: Number of tokens that the embedding has vectors for.
        eos_token_ids: Tokens that end a text; may be empty.
        sampling_defaults: Sampling values of generation_config.json, named as in SamplingParams.
    """

    model: LanguageModel
    config: Any
    architecture: str
    dtype: jnp.dtype
    weight_bytes: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    sampling_defaults: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A weight of a model, and where it is in a checkpoint."""

    path: tuple[Any, ...]
    param: nnx.Param
    key: str
    transposed: bool

    @property
    def is_stack(self) -> bool:
        """Whether it is several of the checkpoint's tensors, one per expert."""
        return "{}" in self.key

    @property
    def keys(self) -> list[str]:
        """The checkpoint's keys of its tensors."""
        return [self.key.format(i) for i in range(self.param.shape[0])] if self.is_stack else [self.key]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor of each key has."""
        shape = self.param.shape[1:] if self.is_stack else self.param.shape
        return (*shape[:-2], *shape[:-3:-1]) if self.transposed else shape


def load_model(
    folder: Path,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    max_model_len: int | None = None,
    overrides: Mapping[str, Any] = types.MappingProxyType({}),
    grid: DeviceGrid | None = None,
) -> LoadedModel:
    """Loads a checkpoint folder onto the default device, or divides it among others.

    Names and shapes of all tensors are checked by the headers before any weight is read. A few tensors at a
    time are then moved out of the mapped files, so that the host never holds two copies of the model.

    Args:
        folder: Holds config.json and model.safetensors, or shards and model.safetensors.index.json.
        dtype: "auto" takes the checkpoint's own.
        max_model_len: Maximum tokens of a text that the user asks for. It extends the context of a model
            whose rotary positions can be (rope.max_positions); it shortens none.
        overrides: Fields in place of those of config.json.
        grid: The devices that share the weights, each of which is read once, straight to where it lies.

    Raises:
        ValueError: If the folder holds no supported model. The message lists every problem with the config,
            or else every weight that is missing, unexpected or of another shape.
    """
    return load_stages(folder, dtype, max_model_len, overrides, (grid,), (0,))[0]


def load_stages(
    folder: Path,
    dtype: Literal["auto", "float32", "bfloat16"],
    max_model_len: int | None,
    overrides: Mapping[str, Any],
    grids: Sequence[DeviceGrid | None],
    own: Sequence[int],
) -> list[LoadedModel]:
    """Loads the stages of a model, each onto devices of its own; for a single one, the model as it is.

    Args:
        folder: As load_model takes it; so are the three that follow.
        dtype: See folder.
        max_model_len: See folder.
        overrides: See folder.
        grids: The devices of each stage; several only of a model that split_model can split.
        own: The stages whose weights are read; the others keep shapes in their places.

    Raises:
        ValueError: As load_model.
    """
    hf_config = read_json(folder / "config.json") | overrides
    whole, chosen, stored = _outline(folder, hf_config, dtype, max_model_len)
    generation_config, architecture = read_generation_config(folder), get_architecture(hf_config)
    eos_token_ids = end_token_ids(generation_config, hf_config, whole.config.vocab_size)
    _check_stored(folder, stored_problems(stored, weights_of(whole), whole.weight_table))
    models = split_model(whole, len(grids)) if len(grids) > 1 else [whole]
    for stage in own:
        read_weights(models[stage], stored, chosen, folder, grids[stage])
    facts = architecture, chosen, eos_token_ids, sampling_defaults(generation_config)
    return [_loaded(model, *facts) for model in models]


def read_weights(
    model: LanguageModel | EagleHead,
    stored: dict[str, StoredTensor],
    dtype: jnp.dtype,
    folder: Path,
    grid: DeviceGrid | None = None,
) -> None:
    """Reads the weights of a model that has shapes in their places, from tensors that were checked."""
    weights = weights_of(model)
    # The largest come first: their temporary copies are made while little else is allocated.
    weights.sort(key=lambda w: -w.param.size)
    start = logged = time.monotonic()
    flat, num_read, num_values = [], 0, sum(w.param.size for w in weights)
    with ThreadPoolExecutor(NUM_LOADING_THREADS) as pool:
        values = pool.map(lambda w: _load_weight(w, stored, dtype, grid).block_until_ready(), weights)
        for w, value in zip(weights, values, strict=True):
            flat.append((w.path, w.param.replace(value)))
            num_read += w.param.size
            if time.monotonic() - logged >= _LOG_INTERVAL_S:
                logged = time.monotonic()
                _LOGGER.info(
                    "read %.0f %% of the weights in %.0f s", 100 * num_read / num_values, logged - start
                )
    nnx.update(model, nnx.from_flat_state(flat))
    seconds, num_bytes = time.monotonic() - start, num_values * dtype.itemsize
    _LOGGER.info("read the weights of %s: %.0f MiB in %.1f s", folder, num_bytes / 2**20, seconds)


def outline(
    folder: Path,
    dtype: Literal["auto", "float32", "bfloat16"],
    max_model_len: int | None,
    overrides: Mapping[str, Any] = types.MappingProxyType({}),
) -> LanguageModel:
    """Returns the model in a checkpoint folder with shapes in place of its weights, which are not read.

    The arguments and the errors are those of load_model.
    """
    return _outline(folder, read_json(folder / "config.json") | overrides, dtype, max_model_len)[0]


def _outline(
    folder: Path,
    hf_config: dict[str, Any],
    dtype: Literal["auto", "float32", "bfloat16"],
    max_model_len: int | None,
) -> tuple[LanguageModel, jnp.dtype, dict[str, StoredTensor]]:
    _, model_class = get_model_class(hf_config)
    config = model_class.config_class.from_hf(hf_config, max_model_len)
    stored = with_decoded(with_prefix(read_headers(folder), model_class.weight_table), hf_config)
    chosen = _choose_dtype(dtype, hf_config, stored)
    return nnx.eval_shape(lambda: model_class(config, dtype=chosen, rngs=nnx.Rngs(0))), chosen, stored


def random_model(
    hf_config: dict[str, Any], dtype: Literal["float32", "bfloat16"], seed: int = 0
) -> LoadedModel:
    """Makes a model with random weights (standard deviation initializer_range) directly on the device.

    Args:
        hf_config: As in config.json.
        dtype: Of the weights.
        seed: The same seed gives the same weights on the same kind of device.

    Raises:
        ValueError: If the config does not describe a supported model.
    """
    architecture, model_class = get_model_class(hf_config)
    config = model_class.config_class.from_hf(hf_config)
    chosen = _choose_dtype(dtype, hf_config, {})
    model = model_class(config, dtype=chosen, rngs=nnx.Rngs(seed))
    return _loaded(model, architecture, chosen, end_token_ids({}, hf_config, config.vocab_size), {})


def save_model(model: LanguageModel, folder: Path, hf_config: dict[str, Any]) -> None:
    """Writes config.json and model.safetensors, which `load_model` and transformers can read.

    Args:
        model: Not modified.
        folder: Created if it does not exist.
        hf_config: The config.json that the model's config was read from; the copy gets the right "dtype",
            and no "quantization_config".

    Raises:
        ValueError: If `hf_config` describes another model.
    """
    if model.config_class.from_hf(hf_config, model.config.max_position_embeddings) != model.config:
        raise ValueError(f"hf_config is {hf_config!r}; allowed: the config of the model, {model.config}")
    tensors, hf_config = {}, {k: v for k, v in hf_config.items() if k != "quantization_config"}
    for weight in weights_of(model):
        value = np.asarray(weight.param[...])
        for key, part in zip(weight.keys, value if weight.is_stack else [value], strict=True):
            tensors[key] = np.asarray(part.mT if weight.transposed else part, order="C")
        hf_config["dtype"] = value.dtype.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def random_checkpoint(
    folder: Path, hf_config: dict[str, Any], dtype: Literal["float32", "bfloat16"], seed: int = 0
) -> None:
    """Writes a checkpoint folder of random weights; see `random_model`."""
    save_model(random_model(hf_config, dtype, seed).model, folder, hf_config)


def weights_of(model: LanguageModel | EagleHead) -> list[Weight]:
    """Returns the weights of a model, and where they are in a checkpoint."""
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return [Weight(path, p, *model.weight_table.hf_key(".".join(map(str, path)))) for path, p in params]


def loaded_from(model: LanguageModel, folder: Path | None) -> LoadedModel:
    """Returns a model in memory with what the engine needs to know about it.

    Args:
        model: Its weights are shared, not copied.
        folder: Where its tokenizer lies: generation_config.json there, if any, names end tokens and sampling
            defaults. None for none.

    Raises:
        ValueError: If its weights are of several types.
    """
    dtypes = {str(x.dtype) for x in jax.tree.leaves(nnx.state(model, nnx.Param))}
    if dtypes not in ({"float32"}, {"bfloat16"}):
        raise ValueError(f"the model's weights are {' and '.join(sorted(dtypes))}; allowed: all of one type")
    generation_config = {} if folder is None else read_generation_config(folder)
    ends = end_token_ids(generation_config, {}, model.config.vocab_size)
    defaults = sampling_defaults(generation_config)
    return _loaded(model, type(model).__name__, jnp.dtype(*dtypes), ends, defaults)


def _loaded(
    model: LanguageModel,
    architecture: str,
    dtype: jnp.dtype,
    eos_token_ids: frozenset[int],
    sampling_defaults: dict[str, Any],
) -> LoadedModel:
    return LoadedModel(
        model=model,
        config=model.config,
        architecture=architecture,
        dtype=dtype,
        weight_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
        max_model_len=model.config.max_position_embeddings,
        vocab_size=model.config.vocab_size,
        eos_token_ids=eos_token_ids,
        sampling_defaults=sampling_defaults,
    )


def _load_weight(
    weight: Weight, stored: dict[str, StoredTensor], dtype: jnp.dtype, grid: DeviceGrid | None
) -> Array:
    if grid is not None and grid.num_devices > 1:
        return _load_divided(weight, stored, dtype, grid)
    device = None if grid is None else grid.devices[0]
    parts = [_place(stored[key].read(), weight.transposed, dtype, device) for key in weight.keys]
    return jnp.stack(parts) if weight.is_stack else parts[0]


def _load_divided(
    weight: Weight, stored: dict[str, StoredTensor], dtype: jnp.dtype, grid: DeviceGrid
) -> Array:
    """Reads of a weight what each device has of it."""
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
    # Never an alias: pages of a mapped file count as memory, and the file may change.
    placed = jax.device_put(value, device, may_alias=False)
    return _convert(placed, transposed, dtype) if transposed or placed.dtype != dtype else placed


@functools.partial(jax.jit, static_argnums=(1, 2))
def _convert(value: Array, transposed: bool, dtype: jnp.dtype) -> Array:
    return (value.mT if transposed else value).astype(dtype)


def _choose_dtype(dtype: str, hf_config: dict[str, Any], stored: dict[str, StoredTensor]) -> jnp.dtype:
    if dtype == "auto":
        own = hf_config.get("dtype") or hf_config.get("torch_dtype")
        found = {str(own)} if own else {STORED_DTYPES.get(s.dtype, s.dtype) for s in stored.values()}
        if found not in ({"float32"}, {"bfloat16"}):
            names = " and ".join(sorted(found))
            raise ValueError(
                f"dtype is 'auto', and the checkpoint's own is {names}; allowed: say dtype='bfloat16' or "
                "dtype='float32' for such a checkpoint"
            )
        (dtype,) = found
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}; allowed: 'auto' or 'float32' or 'bfloat16'")
    return jnp.dtype(dtype)


def stored_problems(stored: dict[str, StoredTensor], weights: list[Weight], table: WeightTable) -> list[str]:
    """Returns what is wrong with tensors: those missing, unexpected, or of another shape or type."""
    expected = {key: weight.stored_shape for weight in weights for key in weight.keys}
    problems = []
    for key, shape in expected.items():
        tensor = stored.get(key)
        if tensor is None:
            untied = ", and config.json does not tie it" if key in table.tied else ""
            problems.append(f"{key} is missing{untied}")
            continue
        if tensor.shape != shape:
            problems.append(f"{key} has shape {tensor.shape}; config.json makes it {shape}")
        if tensor.dtype not in STORED_DTYPES:
            problems.append(f"{key} is of type {tensor.dtype}; allowed: {', '.join(STORED_DTYPES)}")
    for key in stored.keys() - expected.keys():
        kept = table.tied.get(key)
        if kept in expected and kept in stored:
            a, b = stored[key], stored[kept]
            readable = {a.dtype, b.dtype} <= STORED_DTYPES.keys()
            if not readable or not np.array_equal(a.read(), b.read()):
                problems.append(f"{key} differs from {kept}, though config.json ties them")
        elif not re.fullmatch(table.ignored, key):
            problems.append(f"{key} is unexpected")
    return problems


def _check_stored(folder: Path, problems: list[str]) -> None:
    """Raises a ValueError that lists problems, if there are any."""
    if problems:
        lines = "".join(f"\n  {problem}" for problem in sorted(problems))
        raise ValueError(f"the weights in {folder} do not fit its config.json:{lines}")
