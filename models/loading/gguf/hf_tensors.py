"""The tensors of a GGUF file under the names and in the layout that they have in safetensors files.

Quantized tensors keep their blocks. `GgufTensor.as_floats` converts them for weights that a model keeps as
floats, such as embeddings.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jax_paged.models.loading.gguf.block_types import (
    BLOCK_TYPES,
    FLOAT_TYPES,
    READABLE,
    GgufMatrix,
    to_floats,
)
from jax_paged.models.loading.gguf.header import GgufHeader, TensorInfo
from jax_paged.models.loading.gguf.hf_config import config_of
from jax_paged.models.loading.stored_tensors import FLOAT_DTYPES, StoredTensor
from jax_paged.models.parallel.sharding import take_columns
from jax_paged.models.quantization.quantized_linear import QuantizationScheme

# Modules of a layer: names in the file, and in safetensors files.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS = {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
# Weights of gpt-oss whose keys have no end.
_GPT_OSS_WHOLE = {
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_MODULES = {
    "gemma2": _LAYER | _GEMMA,
    "gemma3": _LAYER | _GEMMA,
    "phi3": _LAYER | {"ffn_up": "mlp.gate_up_proj"},
    "gpt-oss": _LAYER | _GPT_OSS,
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Tensors that the configuration is read from.
_ROPE = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclasses.dataclass(frozen=True)
class GgufTensor(StoredTensor):
    """A tensor of a GGUF file, or one expert of a stack.

    The inherited fields describe the values. The dtype is the type in the file, such as "F32" or "Q4_K".

    Args:
        parts: The tensor in the file; or two stacks [E, O, ...] whose second dimensions alternate in this
            tensor.
        num_heads: Number of heads whose rows are stored as in llama.cpp; 0 for the order of transformers. A
            head's rows form the pairs (i, i + n / 2) for transformers, and (2 i, 2 i + 1) for llama.cpp.
        addend: Number that is added to the values.
        end: Last part of the key; "" if the key is the name of the weight without an end.
        is_transposed: Whether transformers has the transposed matrices.
    """

    parts: tuple[TensorInfo, ...]
    num_heads: int = 0
    addend: float = 0.0
    end: str = "weight"
    is_transposed: bool = False

    @property
    def scheme(self) -> QuantizationScheme | None:
        """The layout of the weight on the device; None for floats."""
        if self.dtype in FLOAT_TYPES:
            return None
        return GgufMatrix(self.dtype, self.end, self.shape[:-2]).scheme()

    def read(self) -> np.ndarray:
        """Returns the tensor.

        Returns:
            float [*shape]; or the blocks of a quantized tensor, uint8 [*n, O, B, bytes].
        """
        arrays = [_mapped(part) for part in self.parts]
        array = arrays[0]
        if len(arrays) > 1:
            array = np.stack(arrays, axis=2).reshape(len(array), -1, *array.shape[2:])
        if self.num_heads:
            pairs = array.reshape(self.num_heads, -1, 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        return array.astype(np.float32) + np.float32(self.addend) if self.addend else array

    def as_floats(self, dtype: str) -> StoredTensor:
        """Returns the tensor with float values, in the layout of transformers.

        Args:
            dtype: Name of the dtype of quantized tensors: "float32" or "bfloat16".
        """
        shape = (*self.shape[:-2], *self.shape[:-3:-1]) if self.is_transposed else self.shape
        name = self.dtype if self.dtype in FLOAT_TYPES else {"float32": "F32"}.get(dtype, "BF16")
        return _FloatTensor(self.file, self.key, self.offset, shape, name, self)


@dataclasses.dataclass(frozen=True)
class _FloatTensor(StoredTensor):
    """A tensor of a GGUF file whose blocks are converted to floats when it is read.

    Args:
        source: The tensor.
    """

    source: GgufTensor

    def read(self) -> np.ndarray:
        """Returns the tensor, float [*shape]."""
        return self._from_file(self.source.read())

    def read_columns(self, columns: Sequence[Int[np.ndarray, " c"]]) -> np.ndarray:
        """Returns the selected indices of every dimension; see `StoredTensor.read_columns`."""
        if self.source.is_transposed or len(columns) < 2:
            return take_columns(self.read(), list(columns))
        # Blocks of zeros have the value 0.
        array = self.source.read()
        array = take_columns(array, [*columns[:-1], *[None] * (array.ndim - len(columns) + 1)])
        return take_columns(self._from_file(array), [*[None] * (len(columns) - 1), columns[-1]])

    def _from_file(self, array: np.ndarray) -> np.ndarray:
        if self.source.dtype in BLOCK_TYPES:
            array = to_floats(array, self.source.dtype, FLOAT_DTYPES[self.dtype])
        return array.swapaxes(-1, -2) if self.source.is_transposed else array


def _mapped(part: TensorInfo) -> np.ndarray:
    """Returns a tensor of a file as a memory-mapped array: floats, or the bytes of blocks."""
    if part.type.name in BLOCK_TYPES:
        shape = *part.shape[:-1], part.shape[-1] // part.type.num_values, part.type.num_bytes
        return np.memmap(part.file, np.uint8, "r", part.offset, shape)
    return np.memmap(part.file, FLOAT_DTYPES[part.type.name], "r", part.offset, part.shape)


def tensors_of(header: GgufHeader) -> dict[str, GgufTensor]:
    """Returns the tensors of a file by their keys in safetensors files. Reads no data.

    Args:
        header: The header of the file.

    Raises:
        ValueError: If the architecture or the type of a tensor is not supported.
    """
    config = config_of(header)
    architecture = header.metadata["general.architecture"]
    for tensor in header.tensors.values():
        if tensor.type.name not in READABLE:
            raise ValueError(
                f"{tensor.name} of {tensor.file} must be of a supported type ({', '.join(READABLE)}), got "
                f"{tensor.type.name}"
            )
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: dict[str, GgufTensor] = {}
    for name, tensor in header.tensors.items():
        module, _, end = name.rpartition(".")
        if name in _ROPE:
            continue
        if (match := _LAYER_NAME.fullmatch(name)) is None:
            tensors = [_tensor(f"{_OUTER.get(module, module)}.{end}", tensor)]
        elif architecture == "gpt-oss" and match[2] in _GPT_OSS_WHOLE:
            tensors = _gpt_oss_tensors(header, match, tensor)
        else:
            module = f"model.layers.{match[1]}.{_MODULES.get(architecture, _LAYER).get(match[2], match[2])}"
            tensors = _with_experts(f"{module}.{end}", tensor)
            if architecture == "llama":
                tensors = [dataclasses.replace(t, num_heads=heads.get(match[2], 0)) for t in tensors]
        # In these models the scale of a norm is 1 + weight, and llama.cpp stores the sum.
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            tensors = [dataclasses.replace(t, addend=-1.0) for t in tensors]
        found |= {t.key: t for t in tensors}
    return found


def _tensor(key: str, *parts: TensorInfo, **options: Any) -> GgufTensor:
    """Returns a tensor that consists of one or two tensors of the file."""
    first, shape = parts[0], parts[0].shape
    if len(parts) > 1:
        shape = shape[0], len(parts) * shape[1], *shape[2:]
    return GgufTensor(first.file, key, first.offset, shape, first.type.name, parts, **options)


def _with_experts(key: str, tensor: TensorInfo) -> list[GgufTensor]:
    """Returns one tensor, or the tensors of all experts if the key contains {}."""
    if "{}" not in key:
        return [_tensor(key, tensor)]
    size = tensor.num_bytes // tensor.shape[0]
    return [
        _tensor(
            key.format(i),
            dataclasses.replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + i * size),
        )
        for i in range(tensor.shape[0])
    ]


def _gpt_oss_tensors(header: GgufHeader, match: re.Match[str], tensor: TensorInfo) -> list[GgufTensor]:
    """Returns a tensor of a gpt-oss whose key has no end. The columns of gate and up alternate in one tensor.

    Raises:
        ValueError: If gate and up do not fit together.
    """
    if match[2] == "ffn_up_exps":
        return []  # read together with ffn_gate_exps
    ending = "_bias" if match[3] == "bias" else ""
    key, parts = f"model.layers.{match[1]}.{_GPT_OSS_WHOLE[match[2]]}{ending}", [tensor]
    if match[2] == "ffn_gate_exps":
        up = header.tensors.get(tensor.name.replace("gate", "up"))
        if up is None or len(tensor.shape) < 2 or (up.shape, up.type) != (tensor.shape, tensor.type):
            raise ValueError(
                f"{tensor.name} and {tensor.name.replace('gate', 'up')} in {tensor.file} must have the same "
                f"shape and type, got {tensor} and {up}"
            )
        parts.append(up)
    return [_tensor(key, *parts, end="", is_transposed=len(tensor.shape) == 3)]
