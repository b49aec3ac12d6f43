"""The header of a GGUF file: metadata and descriptions of tensors. Does not import JAX.

A file may come from an untrusted source. Every count and every length is compared with the size of the file
before anything is allocated, and every problem is a ValueError that names the file.

The `gguf` package has a reader too, but it creates several arrays per element of an array, which takes ten
seconds for the vocabulary of a small model, and it does not check counts.
"""

import dataclasses
import functools
import math
import mmap
import re
import struct
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_paged.arguments.shown_values import shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_BOOL = 7
# Names of the types of scalars in Python's array module, by their numbers in a file.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_MAX_VALUES, _MAX_TENSORS, _MAX_DIMENSIONS = 1 << 16, 1 << 20, 4
# The largest vocabularies have 2^18 entries.
_MAX_STRINGS, _MAX_KEY_LEN = 1 << 24, 1 << 16
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class TensorType:
    """A type of tensors.

    Args:
        name: Name of the type, such as "Q4_K".
        num_values: Number of values in a block.
        num_bytes: Size of a block (bytes).
    """

    name: str
    num_values: int
    num_bytes: int


# Types by their numbers in a file. Only those in `block_types.READABLE` are read; the others have names for
# error messages.
TENSOR_TYPES = {
    number: TensorType(*values)
    for number, values in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        9: ("Q8_1", 32, 40),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1),
        25: ("I16", 1, 2),
        26: ("I32", 1, 4),
        27: ("I64", 1, 8),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
        41: ("Q1_0", 128, 18),
    }.items()
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor.

    Args:
        name: Name of the tensor, such as "blk.0.attn_q.weight".
        shape: Shape, with the dimension first whose index changes slowest. The file has the reverse order.
        type: Type of the values.
        file: The file, which is one of several if the model is split.
        offset: Offset of the data in the file (bytes).
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    file: Path
    offset: int

    @property
    def num_bytes(self) -> int:
        """The size of the data (bytes)."""
        return math.prod(self.shape) // self.type.num_values * self.type.num_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class GgufHeader:
    """The header of a GGUF file, or of all files of a model that is split.

    Args:
        file: The file, the first one of a split model.
        metadata: Scalars, strings and arrays by key. Arrays of numbers have the type array, and
            arrays of strings are lists.
        tensors: The tensors by name.
    """

    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Reader:
    """Reader of the values of a mapped file. Reads nothing beyond the end of the file.

    Args:
        file: The file, for messages.
        data: Its content.
    """

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.position = file, data, 0

    def error(self, problem: str) -> ValueError:
        """Returns an error that names the file."""
        return ValueError(f"{self.file} is not a readable GGUF file: {problem}")

    def take(self, num_bytes: int, what: str) -> int:
        """Skips some bytes and returns the position of the first of them."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise self.error(f"it is truncated: {what} at byte {start} needs {num_bytes} bytes")
        self.position += num_bytes
        return start

    def integer(self, layout: str, what: str) -> int:
        """Returns an integer in a format of the struct module."""
        return struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout), what))[0]

    def string(self, what: str, max_len: int | None = None) -> str:
        """Returns a string, which a file stores with its length in bytes."""
        length = self.integer("<Q", f"the length of {what}")
        if max_len is not None and length > max_len:
            raise self.error(f"{what} has {length} bytes, and at most {max_len} are allowed")
        start = self.take(length, what)
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} at byte {start} is not UTF-8") from error

    def value(self, key: str) -> Any:
        """Returns a value of the metadata, which begins with its type."""
        kind = self.integer("<I", f"the type of {key}")
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.elements(key)
        value = self.numbers(kind, 1, key)[0]
        return bool(value) if kind == _BOOL else value

    def elements(self, key: str) -> array[Any] | list[str]:
        """Returns an array of the metadata."""
        kind, num = self.integer("<I", f"the type of {key}"), self.integer("<Q", f"the length of {key}")
        if kind != _STRING:
            return self.numbers(kind, num, key)
        if num > min(_MAX_STRINGS, (len(self.data) - self.position) // 8):
            raise self.error(f"{key} cannot have {num} strings")
        # This loop takes most of the time, so it calls no methods of this class.
        parts, length_at, end = list[bytes](), struct.Struct("<Q").unpack_from, self.position
        for _ in range(num):
            if end + 8 > len(self.data):
                raise self.error(f"it is truncated: {key} at byte {end} has more strings")
            start = end + 8
            end = start + length_at(self.data, end)[0]
            if end > len(self.data):
                raise self.error(f"it is truncated: {key} at byte {start} needs {end - start} bytes")
            parts.append(self.data[start:end])
        self.position = end
        try:
            return [part.decode() for part in parts]
        except UnicodeDecodeError as error:
            raise self.error(f"{key} has a string that is not UTF-8") from error

    def numbers(self, kind: int, num: int, key: str) -> array[Any]:
        """Returns some numbers of the metadata as an array."""
        if kind not in _SCALARS:
            raise self.error(f"{key} has the unknown type {kind}")
        values = array(_SCALARS[kind])
        start = self.take(num * values.itemsize, key)
        values.frombytes(self.data[start : self.position])
        if sys.byteorder == "big":
            values.byteswap()
        return values


def read_header(file: Path) -> GgufHeader:
    """Returns the header of a GGUF file. The other files of a split model are read too.

    The header is kept in memory as long as the file does not change.

    Args:
        file: The file. If the model is split, any of its files.

    Raises:
        ValueError: If a file is missing, truncated or not readable.
    """
    files = shards_of(file)
    if missing := [f.name for f in files if not f.is_file()]:
        raise ValueError(
            f"{file.parent} must contain all files of the model, but these are missing: {missing}"
        )
    headers = [_read_file(f, f.stat().st_mtime_ns, f.stat().st_size) for f in files]
    if len(headers) == 1:
        return headers[0]
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        if both := header.tensors.keys() & tensors.keys():
            raise ValueError(
                f"{header.file} has tensors that other files of the model have too: {sorted(both)[:3]}"
            )
        tensors |= header.tensors
    first = headers[0]
    num = first.metadata.get("split.tensors.count", len(tensors))
    if num != len(tensors):
        raise ValueError(f"the files of {first.file} must have {shown(num)} tensors, got {len(tensors)}")
    return GgufHeader(first.file, first.metadata, tensors)


def shards_of(file: Path) -> list[Path]:
    """Returns all files of a split model, such as "name-00001-of-00003.gguf"; [file] if it is not split.

    Args:
        file: The file, which need not exist.

    Raises:
        ValueError: If the numbers in the name contradict each other.
    """
    match = _SHARD.fullmatch(file.name)
    if match is None:
        return [file]
    number, num = int(match[2]), int(match[3])
    if not 1 <= number <= num <= 4096:
        raise ValueError(f"{file} must have a number from 1 to {num} in its name, got {number}")
    return [file.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in range(1, num + 1)]


@functools.lru_cache(maxsize=32)
def _read_file(file: Path, _modified_ns: int, size: int) -> GgufHeader:
    """Returns the header of one file. The time and the size tell the cache whether the file has changed."""
    if size == 0:
        raise ValueError(f"{file} is not a readable GGUF file: it is empty")
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        read = _Reader(file, data)
        if data[:4] != _MAGIC:
            raise read.error("it does not begin with 'GGUF'")
        read.position = 4
        version = read.integer("<I", "the version")
        if version not in _VERSIONS:
            hint = " (big-endian files are not supported)" if version & 0xFFFF == 0 else ""
            raise read.error(f"it has version {version}, and versions 2 and 3 are supported{hint}")
        num_tensors, num_values = read.integer("<Q", "a count"), read.integer("<Q", "a count")
        if num_tensors > _MAX_TENSORS or num_values > _MAX_VALUES:
            raise read.error(f"it cannot have {num_tensors} tensors and {num_values} values")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = read.string("a key", _MAX_KEY_LEN)
            if key in metadata:
                raise read.error(f"it has {shown(key)} twice")
            metadata[key] = read.value(key)
        return GgufHeader(file, metadata, _read_tensors(read, num_tensors, metadata))


def _read_tensors(read: _Reader, num: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
    """Returns the descriptions of the tensors, whose data lies within the file."""
    found: dict[str, tuple[tuple[int, ...], TensorType, int]] = {}
    for _ in range(num):
        name = read.string("the name of a tensor", _MAX_KEY_LEN)
        if name in found:
            raise read.error(f"it has the tensor {shown(name)} twice")
        num_dimensions = read.integer("<I", name)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise read.error(f"{shown(name)} cannot have {num_dimensions} dimensions")
        shape = tuple(read.integer("<Q", name) for _ in range(num_dimensions))[::-1]
        kind, offset = read.integer("<I", name), read.integer("<Q", name)
        if kind not in TENSOR_TYPES:
            raise read.error(f"{shown(name)} has the unknown type {kind}")
        if 0 in shape or shape[-1] % TENSOR_TYPES[kind].num_values:
            raise read.error(f"{shown(name)} cannot have the shape {shape} in {TENSOR_TYPES[kind].name}")
        found[name] = shape, TENSOR_TYPES[kind], offset
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
        raise read.error(f"general.alignment must be an integer of at least 1, got {shown(alignment)}")
    start = -(-read.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, (shape, kind, offset) in found.items():
        tensor = TensorInfo(name, shape, kind, read.file, start + offset)
        if tensor.offset + tensor.num_bytes > len(read.data):
            end = tensor.offset + tensor.num_bytes
            raise read.error(
                f"it is truncated: {shown(name)} ends at byte {end}, and the file has {len(read.data)} bytes"
            )
        tensors[name] = tensor
    return tensors


def select_files(names: Sequence[str], quantization: str | None) -> list[str]:
    """Returns the names of the files that hold a model, one per model; of a split model, the first file.

    Projectors of image models ("mmproj") are left out.

    Args:
        names: Names of files.
        quantization: End of the stem of the name, such as "Q4_K_M", in upper or lower case; None for any.
    """
    found = []
    for name in sorted(names):
        match = _SHARD.fullmatch(name)
        stem = match[1] if match else name.removesuffix(".gguf")
        if not name.endswith(".gguf") or (match and int(match[2]) > 1) or "mmproj" in name.lower():
            continue
        if quantization is None or re.search(rf"(^|[-._/]){re.escape(quantization.lower())}$", stem.lower()):
            found.append(name)
    return found
