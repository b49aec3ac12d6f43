"""Loading and saving of checkpoint folders in Hugging Face layout, with weights in safetensors files.

`load_model` first builds an outline: the model with shapes in place of its weights. The tensors in the files'
headers are compared with the outline, and only then are the weights read.
"""

import dataclasses
import json
import logging
import types
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jax_paged.arguments.shown_values import one_of, shown
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.checkpoint import (
    end_token_ids,
    is_gguf,
    read_config,
    read_generation_config,
    sampling_defaults,
)
from jax_paged.models.layers import Float32Param
from jax_paged.models.loading.gguf.header import read_header
from jax_paged.models.loading.gguf.hf_tensors import GgufTensor, tensors_of
from jax_paged.models.loading.stored_tensors import FLOAT_DTYPES, StoredTensor, read_headers, with_prefix
from jax_paged.models.loading.weight_reading import (
    check_stored,
    raise_problems,
    read_weights,
    weight_at,
    weights_of,
    without_numbers,
)
from jax_paged.models.parallel.sharding import DeviceGrid
from jax_paged.models.parallel.stages import num_bytes, split_model
from jax_paged.models.quantization.config import quantization_of
from jax_paged.models.quantization.mxfp4 import with_decoded
from jax_paged.models.quantization.quantize import (
    KernelPlace,
    apply_schemes,
    choose_online_dtype,
    kernel_places,
    log_other_types,
    quantize_outline,
)
from jax_paged.models.quantization.quantized_linear import ONLINE_DTYPES, QuantizationScheme, QuantizedWeight
from jax_paged.models.registry import get_architecture, get_model_class

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model on the device, and the data about it that the engine needs.

    Args:
        model: The Flax module, which owns the weights.
        architecture: The name under "architectures" in config.json.
        dtype: The dtype of weights and activations: float32 or bfloat16.
        weight_bytes: Size of all weights (bytes).
        eos_token_ids: Ids of the tokens that end a sequence; may be empty.
        sampling_defaults: Sampling parameters of generation_config.json, by their names in SamplingParams.
    """

    model: LanguageModel
    architecture: str
    dtype: jnp.dtype
    weight_bytes: int
    eos_token_ids: frozenset[int]
    sampling_defaults: dict[str, Any]

    @property
    def config(self) -> Any:
        """The configuration of the family, such as a LlamaConfig."""
        return self.model.config

    @property
    def max_model_len(self) -> int:
        """The maximum sequence length (tokens)."""
        return self.config.max_position_embeddings

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the embedding table has vectors for."""
        return self.config.vocab_size


def load_model(
    folder: Path,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    max_model_len: int | None = None,
    overrides: Mapping[str, Any] = types.MappingProxyType({}),
    grid: DeviceGrid | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    """Loads a checkpoint folder onto the default device, or divides it among several devices.

    The names and shapes of all tensors are checked before any weight is read. The weights are copied from
    memory-mapped files a few tensors at a time, so the host never holds a second copy of the model.

    Args:
        folder: Holds config.json, and either model.safetensors or shards with model.safetensors.index.json.
        dtype: The dtype of weights and activations. "auto" is the dtype of the checkpoint, or bfloat16 if the
            checkpoint has float16 or several dtypes.
        max_model_len: The maximum sequence length that the user requests (tokens). It can extend the context
            of a model whose rotary positions allow it (see `rope.max_positions`); it never shortens the
            context.
        overrides: Values that replace fields of config.json.
        grid: The devices that share the weights; None for the default device. Every weight is read once,
            directly into the memory of the devices that need it.
        quantization: "int4", "int8" or "fp8" to quantize float weights while they are read (see quantize.py).
            Otherwise None, or the quantization method of the checkpoint.

    Raises:
        ValueError: If the folder holds no supported model. The message lists every problem with config.json.
            If there are none, it lists every weight that is missing, unexpected or of the wrong shape.
    """
    return load_stages(folder, dtype, max_model_len, overrides, quantization, (grid,), (0,))[0]


def load_stages(
    folder: Path,
    dtype: Literal["auto", "float32", "bfloat16"],
    max_model_len: int | None,
    overrides: Mapping[str, Any],
    quantization: str | None,
    grids: Sequence[DeviceGrid | None],
    stage_indices: Sequence[int],
) -> list[LoadedModel]:
    """Loads the pipeline stages of a model, each onto its own devices.

    Args:
        folder: See `load_model`.
        dtype: See `load_model`.
        max_model_len: See `load_model`.
        overrides: See `load_model`.
        quantization: See `load_model`.
        grids: The devices of each stage. With a single entry, the model is not split.
        stage_indices: Indices of the stages whose weights are read. The other stages keep shapes in place of
            weights.

    Returns:
        One model per stage.

    Raises:
        ValueError: As in `load_model`, or if the model cannot be split into stages.
    """
    hf_config = read_config(folder, overrides)
    whole, model_dtype, stored = _outline(folder, hf_config, dtype, max_model_len, quantization)
    generation_config, architecture = read_generation_config(folder), get_architecture(hf_config)
    eos_token_ids = end_token_ids(generation_config, hf_config, whole.config.vocab_size)
    check = check_stored(stored, weights_of(whole), whole.weight_table)
    raise_problems(f"the weights in {folder} do not fit its config.json", check.problems)
    log_unused(folder, check.unused)
    if dtype == "auto":
        _warn_of_dtype(folder, _checkpoint_dtypes(hf_config, stored), model_dtype.name)
    if (target := choose_online_dtype([whole], quantization)) is not None:
        log_other_types(whole, target)
    models = split_model(whole, len(grids)) if len(grids) > 1 else [whole]
    for stage in stage_indices:
        read_weights(models[stage], stored, model_dtype, folder, grids[stage])
    defaults = sampling_defaults(generation_config)
    return [LoadedModel(m, architecture, model_dtype, num_bytes(m), eos_token_ids, defaults) for m in models]


def outline(
    folder: Path,
    dtype: Literal["auto", "float32", "bfloat16"],
    max_model_len: int | None,
    overrides: Mapping[str, Any] = types.MappingProxyType({}),
    quantization: str | None = None,
) -> LanguageModel:
    """Returns the model of a checkpoint folder with shapes in place of weights, which are not read.

    Args:
        folder: See `load_model`.
        dtype: See `load_model`.
        max_model_len: See `load_model`.
        overrides: See `load_model`.
        quantization: See `load_model`.

    Raises:
        ValueError: If the folder holds no supported model; see `load_model`.
    """
    hf_config = read_config(folder, overrides)
    return _outline(folder, hf_config, dtype, max_model_len, quantization)[0]


def _outline(
    folder: Path,
    hf_config: dict[str, Any],
    dtype: Literal["auto", "float32", "bfloat16"],
    max_model_len: int | None,
    quantization: str | None,
) -> tuple[LanguageModel, jnp.dtype, dict[str, StoredTensor]]:
    _, model_class = get_model_class(hf_config)
    config = model_class.config_class.from_hf(hf_config, max_model_len)
    method, weight_format = quantization_of(hf_config)
    allowed = (None, method) if method else (None, *ONLINE_DTYPES)
    _check_quantization(quantization, allowed, folder)
    stored = with_prefix(stored_tensors(folder), model_class.weight_table)
    stored = with_decoded(stored) if method == "mxfp4" else stored
    model_dtype = _choose_dtype(dtype, hf_config, stored)
    model = nnx.eval_shape(lambda: model_class(config, dtype=model_dtype, rngs=nnx.Rngs(0)))
    if is_gguf(folder):
        stored = _keep_gguf_blocks(model, stored, model_dtype.name)
        if any(isinstance(place.kernel, QuantizedWeight) for place in kernel_places(model)):
            _check_quantization(quantization, (None,), folder)
    if weight_format is None:
        return quantize_outline(model, choose_online_dtype([model], quantization)), model_dtype, stored
    modules: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for key, tensor in stored.items():
        stem, _, end = key.rpartition(".")
        modules[stem][end] = tensor

    def scheme_of(place: KernelPlace) -> QuantizationScheme | None:
        stem = weight_at(model, place.path, place.kernel).keys[0].removesuffix(".weight")
        try:
            return weight_format.scheme(modules[stem], *place.kernel.shape[-2:])
        except ValueError as error:
            raise ValueError(f"the weights of {stem} in {folder} can't be read: {error}") from error

    apply_schemes(model, scheme_of)
    return model, model_dtype, stored


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint by key, without reading any data.

    Args:
        folder: The checkpoint folder, or a GGUF file.

    Raises:
        ValueError: If files are missing, incomplete or not supported.
    """
    return {**tensors_of(read_header(folder))} if is_gguf(folder) else read_headers(folder)


def _keep_gguf_blocks(
    model: LanguageModel, stored: Mapping[str, StoredTensor], dtype: str
) -> dict[str, StoredTensor]:
    """Replaces the shapes of weights that a GGUF file has quantized.

    Args:
        model: A model with shapes in place of weights; it is modified.
        stored: The tensors of the file by key.
        dtype: Name of the dtype of the model.

    Returns:
        The tensors, with floats in place of the blocks of other weights, such as embeddings.
    """

    def scheme_of(place: KernelPlace) -> QuantizationScheme | None:
        tensor = stored.get(weight_at(model, place.path, place.kernel).keys[0])
        return tensor.scheme if isinstance(tensor, GgufTensor) else None

    apply_schemes(model, scheme_of)
    quantized = {k for w in weights_of(model) if isinstance(w.param, QuantizedWeight) for k in w.keys}
    return {
        key: tensor.as_floats(dtype) if isinstance(tensor, GgufTensor) and key not in quantized else tensor
        for key, tensor in stored.items()
    }


def random_model(
    hf_config: dict[str, Any], dtype: Literal["float32", "bfloat16"], seed: int = 0
) -> LoadedModel:
    """Returns a model with random weights of standard deviation initializer_range, created on the device.

    Args:
        hf_config: The contents of a config.json.
        dtype: The dtype of the weights.
        seed: Seed of the weights. The same seed gives the same weights on the same type of device.

    Raises:
        ValueError: If `hf_config` does not describe a supported model.
    """
    architecture, model_class = get_model_class(hf_config)
    config = model_class.config_class.from_hf(hf_config)
    model_dtype = _choose_dtype(dtype, hf_config, {})
    model = model_class(config, dtype=model_dtype, rngs=nnx.Rngs(seed))
    ends = end_token_ids({}, hf_config, config.vocab_size)
    return LoadedModel(model, architecture, model_dtype, num_bytes(model), ends, {})


def save_model(model: LanguageModel, folder: Path, hf_config: dict[str, Any]) -> None:
    """Writes config.json and model.safetensors, which `load_model` and transformers can read.

    Args:
        model: The model; not modified.
        folder: The folder to write to. It is created if it does not exist.
        hf_config: The config.json that the model's config was read from. The written file has the dtype of
            the weights, and no "quantization_config".

    Raises:
        ValueError: If `hf_config` describes another model, or if the model has quantized weights.
    """
    if model.config_class.from_hf(hf_config, model.config.max_position_embeddings) != model.config:
        raise ValueError(
            f"`hf_config` must be the config of the model, {model.config}, got {shown(hf_config)}"
        )
    weights = weights_of(model)
    if any(isinstance(w.param, QuantizedWeight) for w in weights):
        raise ValueError("`model` must have float weights, got a quantized model")
    tensors, hf_config = {}, {k: v for k, v in hf_config.items() if k != "quantization_config"}
    for weight in weights:
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
    """Writes a checkpoint folder with random weights; see `random_model`.

    Args:
        folder: The folder to write to. It is created if it does not exist.
        hf_config: The contents of a config.json.
        dtype: The dtype of the weights.
        seed: Seed of the weights.
    """
    save_model(random_model(hf_config, dtype, seed).model, folder, hf_config)


def as_loaded_model(model: LanguageModel, folder: Path | None) -> LoadedModel:
    """Returns a LoadedModel for a model that is already in memory.

    Args:
        model: The model. Its weights are shared, not copied.
        folder: The folder of the tokenizer. A generation_config.json in it defines the end tokens and the
            sampling defaults. None for no folder.

    Raises:
        ValueError: If the weights have different dtypes.
    """
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    dtypes = {str(param.dtype) for _, param in params if not isinstance(param, Float32Param)}
    if dtypes not in ({"float32"}, {"bfloat16"}):
        raise ValueError(
            f"the weights of `model` must all be float32 or all bfloat16, got {' and '.join(sorted(dtypes))}"
        )
    generation_config = {} if folder is None else read_generation_config(folder)
    ends = end_token_ids(generation_config, {}, model.config.vocab_size)
    defaults = sampling_defaults(generation_config)
    return LoadedModel(model, type(model).__name__, jnp.dtype(*dtypes), num_bytes(model), ends, defaults)


def log_unused(folder: Path, unused: Sequence[str]) -> None:
    """Logs a warning that lists the tensors of a checkpoint that are not read, if there are any.

    Args:
        folder: The checkpoint folder.
        unused: Keys of these tensors.
    """
    if unused:
        _LOGGER.warning("%s contains tensors that are not used: %s", folder, without_numbers(unused))


def _check_quantization(quantization: str | None, allowed: Sequence[str | None], folder: Path) -> None:
    if quantization not in allowed:
        names = f"{one_of(allowed)} for the weights in {folder}"
        raise ValueError(f"`quantization` must be {names}, got {shown(quantization)}")


def _choose_dtype(dtype: str, hf_config: dict[str, Any], stored: dict[str, StoredTensor]) -> jnp.dtype:
    """Returns the dtype of weights and activations.

    "auto" is float32 if the checkpoint is in float32, else bfloat16.
    """
    if dtype == "auto":
        dtypes = _checkpoint_dtypes(hf_config, stored)
        if not dtypes or not dtypes <= set(FLOAT_DTYPES.values()):
            raise ValueError(
                "`dtype` must be 'bfloat16' or 'float32' because the dtype of the checkpoint is "
                f"{' and '.join(sorted(dtypes)) or 'unknown'}, got 'auto'"
            )
        dtype = "float32" if dtypes == {"float32"} else "bfloat16"
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"`dtype` must be one of 'auto', 'float32', 'bfloat16', got {shown(dtype)}")
    return jnp.dtype(dtype)


def _warn_of_dtype(folder: Path, dtypes: set[str], model_dtype: str) -> None:
    """Logs a warning if a model and its checkpoint have different dtypes."""
    if dtypes != {model_dtype}:
        message = (
            "the weights in %s are %s, and served in %s; dtype='float32' is exact and needs twice the memory"
        )
        _LOGGER.warning(message, folder, " and ".join(sorted(dtypes)), model_dtype)


def _checkpoint_dtypes(hf_config: dict[str, Any], stored: dict[str, StoredTensor]) -> set[str]:
    """Returns the dtype that config.json declares, or else the dtypes of the stored float tensors.

    Integers are positions, masks or quantized weights, and 8-bit floats are quantized weights. None of them
    is the dtype of activations.
    """
    both = hf_config, hf_config.get("text_config") or {}
    declared = next(filter(None, (x.get(name) for x in both for name in ("dtype", "torch_dtype"))), None)
    if declared:
        return {str(declared)}
    return {FLOAT_DTYPES[tensor.dtype] for tensor in stored.values() if tensor.dtype in FLOAT_DTYPES}
