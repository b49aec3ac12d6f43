"""The tensors in the safetensors files of a checkpoint."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors needs)
import numpy as np
from jaxtyping import Int
from safetensors import SafetensorError, safe_open

from jax_paged.arguments.shown_values import shown
from jax_paged.models.checkpoint import read_json
from jax_paged.models.hf_format import WeightTable
from jax_paged.models.parallel.sharding import take_columns

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The dtypes of float weights.
FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# The dtypes of quantized weights of 8 or 4 bits, and of the arrays that belong to them.
QUANTIZED_DTYPES = {"I64": "int64", "I32": "int32", "I8": "int8", "U8": "uint8", "F8_E4M3": "float8_e4m3fn"}
# Name of a shard: its number, and the number of shards.
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, as described by the header of its file.

    Args:
        file: The safetensors file.
        key: Name of the tensor.
        offset: Offset of the data in the file (bytes).
        shape: Shape of the tensor.
        dtype: Name of the dtype in the safetensors format, such as "BF16".
    """

    file: Path
    key: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        """Returns the tensor as a memory-mapped array. Its data is read when it is accessed."""
        # The file is mapped again for each tensor because pages that were read count as memory of this
        # process until their mapping is closed.
        dtype = (FLOAT_DTYPES | QUANTIZED_DTYPES)[self.dtype]
        return np.memmap(self.file, dtype, "r", self.offset, self.shape or (1,)).reshape(self.shape)

    def read_columns(self, columns: Sequence[Int[np.ndarray, " c"]]) -> np.ndarray:
        """Returns the selected indices of every dimension, without reading the others.

        Args:
            columns: For each dimension, int [c]: the indices to select. An index of -1 gives zeros.
        """
        value = self.read()
        for axis, order in enumerate(columns):
            if order[0] >= 0 and (np.diff(order) == 1).all():
                value = value[(slice(None),) * axis + (slice(order[0], order[-1] + 1),)]
            else:
                value = take_columns(value, [*[None] * axis, order])
        return value


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of all files of a folder by key, without reading any data.

    Args:
        folder: The checkpoint folder.

    Raises:
        ValueError: If files are missing or incomplete, or if two of them have a tensor with the same key.
    """
    names = _file_names(folder)
    stored: dict[str, StoredTensor] = {}
    for name in names:
        file = folder / name
        try:
            with safe_open(file, "numpy") as f:  # safe_open checks the whole header
                keys = list(f.keys())
        except SafetensorError as e:
            raise ValueError(f"{file} is incomplete or not a safetensors file: {e}") from e
        with file.open("rb") as f:
            header_len = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(header_len))
        for key in keys:
            if key in stored:
                raise ValueError(f"{key} is in two files, {stored[key].file} and {file}")
            part = header[key]
            offset = 8 + header_len + part["data_offsets"][0]
            stored[key] = StoredTensor(file, key, offset, tuple(part["shape"]), part["dtype"])
    return stored


def _file_names(folder: Path) -> list[str]:
    """Returns the names of a folder's safetensors files.

    These are the single file, or the files in the index, or a complete set of shards.

    Raises:
        ValueError: If there are no files, or if some are missing.
    """
    if (folder / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    if not (folder / INDEX_FILE).exists():
        return _shard_names(folder)
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ValueError(
            f"`weight_map` of {folder / INDEX_FILE} must map tensors to file names, got {shown(weight_map)}"
        )
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder / INDEX_FILE} lists missing shards: {missing}; copy them to the folder")
    return names


def _shard_names(folder: Path) -> list[str]:
    """Returns the names of the shards in a folder without an index.

    Each name contains the number of shards, which shows whether some are missing.

    Raises:
        ValueError: If there are no shards, or if some are missing.
    """
    names = sorted(file.name for file in folder.iterdir())
    shards = {name: match for name in names if (match := _SHARD.fullmatch(name))}
    start = f"{folder} contains neither {SINGLE_FILE} nor {INDEX_FILE}"
    if not shards:
        tensors = [name for name in names if name.endswith(".safetensors")]
        hint = "Weights in other formats are not supported: convert them to safetensors"
        if tensors:
            hint = f"Rename {tensors[0]} to {SINGLE_FILE} if it has the whole model with transformers' keys"
        raise ValueError(f"{start}, got the files {names}. {hint}")
    if len({match[2] for match in shards.values()}) > 1:
        raise ValueError(
            f"{start}, and shards of several checkpoints: {list(shards)}; keep the shards of only one"
        )
    (first, *_) = shards.values()
    width, num_shards = len(first[2]), int(first[2])
    expected = [f"model-{i:0{width}}-of-{first[2]}.safetensors" for i in range(1, num_shards + 1)]
    if missing := [name for name in expected if name not in shards]:
        raise ValueError(f"{start}, and shards are missing: {missing}; copy them to the folder")
    return expected


def with_prefix[T](stored: dict[str, T], table: WeightTable) -> dict[str, T]:
    """Returns tensors by the keys of a weight table.

    Keys of older checkpoints may have other prefixes, or lack the prefix of the table.

    Args:
        stored: Tensors by their keys in the checkpoint.
        table: The weight table of the family.
    """
    for old, new in table.renamed.items():
        stored = {new + k.removeprefix(old) if k.startswith(old) else k: t for k, t in stored.items()}
    if any(key.startswith(table.prefix) for key in stored):
        return stored
    return {key if key in table.tied else table.prefix + key: tensor for key, tensor in stored.items()}
