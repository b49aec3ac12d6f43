"""Checkpoint formats of quantized weights: AWQ, GPTQ, compressed-tensors and fp8.

All formats divide the rows of a weight matrix, which are the inputs of a linear map, into groups, and store
scales for each group. They differ in the order of the 4-bit numbers within 32-bit words, in which tensors are
transposed, and in the names of tensors.

A class here implements WeightFormat, the format of a checkpoint, or `quantized_linear.StoredMatrix`, the
layout of one matrix. AwqFormat and GptqFormat implement both.

Source: Lin et al., AWQ, 2024, and Frantar et al., GPTQ, 2023; the layouts are the ones that AutoAWQ (version
"gemm"), AutoGPTQ and GPTQModel (checkpoint formats "gptq" and "gptq_v2"), compressed-tensors and
transformers' FineGrainedFP8Config write.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from jaxtyping import Int, UInt8

from jax_paged.models.quantization.quantized_linear import QuantizationScheme, QuantizedArrays, pack_pairs

WORD = ("I32",)
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
BYTES = {"F8_E4M3": "float8_e4m3fn", "I8": "int8"}
# Position of each of eight columns among the 4-bit numbers of an AWQ word.
_AWQ_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]
# Zero point of symmetric 4-bit numbers.
_MIDDLE = 8

# The shape that a tensor must have, and the dtypes that it may have.
Expected = tuple[tuple[int, ...], tuple[str, ...]]


class Header(Protocol):
    """Description of a tensor in the header of a safetensors file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype of the tensor in the safetensors format, such as "BF16"."""
        ...


class WeightFormat(Protocol):
    """Format of all quantized weights of a checkpoint, according to its quantization_config."""

    def scheme(self, found: Mapping[str, Header], rows: int, columns: int) -> QuantizationScheme | None:
        """Returns the quantization scheme of a weight matrix; None if the matrix is stored as floats.

        Args:
            found: The tensors of the module, by the last part of their keys.
            rows: Number of rows of the matrix.
            columns: Number of columns of the matrix.

        Raises:
            ValueError: If the shapes of the tensors do not fit the matrix.
        """
        ...


@dataclasses.dataclass(frozen=True)
class AwqFormat:
    """AWQ, version "gemm". Values and zero points are in 32-bit words of eight interleaved columns.

    Args:
        group_size: Number of rows in a group; None if all rows are one group.
    """

    group_size: int | None

    def scheme(self, found: Mapping[str, Header], rows: int, columns: int) -> QuantizationScheme | None:
        """Returns the quantization scheme of a weight matrix; see WeightFormat."""
        if "qweight" not in found:
            return None
        return QuantizationScheme("uint8", self.group_size or rows, self, _scales(found, "scales"), True)

    def tensors(self, rows: int, columns: int) -> dict[str, Expected]:
        """Returns the expected shapes and dtypes of the tensors of a weight matrix; see StoredMatrix."""
        groups = _groups(rows, self.group_size)
        return {
            "qweight": ((rows, -(-columns // 8)), WORD),
            "qzeros": ((groups, -(-columns // 8)), WORD),
            "scales": ((groups, columns), tuple(FLOATS)),
        }

    def arrays(self, tensors: dict[str, np.ndarray]) -> QuantizedArrays:
        """Returns the arrays of a quantized weight; see StoredMatrix."""
        values, zeros = (_unpacked(tensors[name], _AWQ_POSITIONS) for name in ("qweight", "qzeros"))
        return QuantizedArrays(pack_pairs(values), np.asarray(tensors["scales"]), zeros)


@dataclasses.dataclass(frozen=True)
class GptqFormat:
    """GPTQ. Values are in 32-bit words of eight rows, and zero points in 32-bit words of eight columns.

    Args:
        group_size: Number of rows in a group; None if all rows are one group.
        is_ordered: Whether g_idx assigns each row to a group (desc_act). If not, groups are consecutive rows.
        is_v2: Whether zero points are stored unchanged. The first version of the format stores them minus 1.
    """

    group_size: int | None
    is_ordered: bool
    is_v2: bool

    def scheme(self, found: Mapping[str, Header], rows: int, columns: int) -> QuantizationScheme | None:
        """Returns the quantization scheme of a weight matrix; see WeightFormat."""
        if "qweight" not in found:
            return None
        is_ordered = self.is_ordered and self.group_size is not None
        source = dataclasses.replace(self, is_ordered=is_ordered)
        scales = _scales(found, "scales")
        return QuantizationScheme("uint8", self.group_size or rows, source, scales, True, is_ordered)

    def tensors(self, rows: int, columns: int) -> dict[str, Expected]:
        """Returns the expected shapes and dtypes of the tensors of a weight matrix; see StoredMatrix."""
        groups = _groups(rows, self.group_size)
        return {
            "qweight": ((-(-rows // 8), columns), WORD),
            "qzeros": ((groups, -(-columns // 8)), WORD),
            "scales": ((groups, columns), tuple(FLOATS)),
            "g_idx": ((rows,), WORD),
        }

    def arrays(self, tensors: dict[str, np.ndarray]) -> QuantizedArrays:
        """Returns the arrays of a quantized weight; see StoredMatrix."""
        words, zeros = tensors["qweight"], np.asarray(tensors["qzeros"])
        # Each byte of a word holds two rows in the order of `QuantizedArrays.values`.
        values = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
        values = values.transpose(0, 2, 1).reshape(-1, words.shape[1])
        if not self.is_v2:
            # Add 1 to each of the eight 4-bit numbers. The format was written by a subtraction from the whole
            # word, so adding to the whole word undoes its borrows as well.
            zeros = (zeros.view(np.uint32) + np.uint32(0x11111111)).view(np.int32)
        groups, group_of_row = None, np.asarray(tensors["g_idx"])
        scales = np.asarray(tensors["scales"])
        if self.is_ordered:
            groups = _checked_groups(group_of_row, len(scales))
        else:
            group_size = self.group_size or len(group_of_row)
            if not np.array_equal(group_of_row, np.arange(len(group_of_row)) // group_size):
                raise ValueError("g_idx must assign consecutive rows to each group because desc_act is false")
        return QuantizedArrays(values, scales, _unpacked(zeros), groups)


@dataclasses.dataclass(frozen=True)
class PackedInt4Matrix:
    """4-bit matrix in compressed-tensors' format "pack-quantized".

    It is stored transposed, in 32-bit words of eight rows.

    Args:
        num_groups: Number of groups of rows.
        has_zeros: Whether zero points are stored, in 32-bit words of eight columns. If not, all zero points
            are 8.
        is_ordered: Whether weight_g_idx assigns each row to a group.
    """

    num_groups: int
    has_zeros: bool
    is_ordered: bool

    def tensors(self, rows: int, columns: int) -> dict[str, Expected]:
        """Returns the expected shapes and dtypes of the tensors of a weight matrix; see StoredMatrix."""
        found: dict[str, Expected] = {
            "weight_packed": ((columns, -(-rows // 8)), WORD),
            "weight_scale": ((columns, self.num_groups), tuple(FLOATS)),
            "weight_shape": ((2,), ("I64", "I32")),
        }
        if self.has_zeros:
            found["weight_zero_point"] = (-(-columns // 8), self.num_groups), WORD
        if self.is_ordered:
            found["weight_g_idx"] = (rows,), WORD
        return found

    def arrays(self, tensors: dict[str, np.ndarray]) -> QuantizedArrays:
        """Returns the arrays of a quantized weight; see StoredMatrix."""
        values = np.ascontiguousarray(tensors["weight_packed"]).view(np.uint8).T
        scales = np.ascontiguousarray(tensors["weight_scale"].T)
        zeros = np.full(scales.shape, _MIDDLE, np.uint8)
        if self.has_zeros:
            zeros = _unpacked(tensors["weight_zero_point"].T)
        groups = _checked_groups(tensors["weight_g_idx"], self.num_groups) if self.is_ordered else None
        return QuantizedArrays(np.ascontiguousarray(values), scales, zeros, groups)


@dataclasses.dataclass(frozen=True)
class EightBitMatrix:
    """A matrix of 8-bit numbers, stored transposed.

    Args:
        dtype: The dtype of the numbers, as in the header of a safetensors file.
        scale: Last part of the key of the scales.
        scale_shape: Shape of the scales. There is one scale for the matrix, for each column, for each group
            of rows in each column, or for each block.
        block: Number of columns and rows of the matrix in a block with one scale; None if there are no
            blocks.
        has_zeros: Whether zero points are stored, in the shape of the scales.
        others: Last part of the key, shape and dtypes of the tensors that are stored for quantized
            activations. They are not read.
    """

    dtype: str
    scale: str
    scale_shape: tuple[int, ...]
    block: tuple[int, int] | None = None
    has_zeros: bool = False
    others: tuple[tuple[str, Expected], ...] = ()

    def tensors(self, rows: int, columns: int) -> dict[str, Expected]:
        """Returns the expected shapes and dtypes of the tensors of a weight matrix; see StoredMatrix."""
        scale_shape = self.scale_shape
        if self.block is not None:
            scale_shape = -(-columns // self.block[0]), -(-rows // self.block[1])
        elif scale_shape not in ((), (1,), (columns,), (columns, 1)) and scale_shape[:1] != (columns,):
            scale_shape = (columns, 1)  # the message about the unsupported shape asks for this one
        found: dict[str, Expected] = {
            "weight": ((columns, rows), (self.dtype,)),
            self.scale: (scale_shape, tuple(FLOATS)),
        }
        if self.has_zeros:
            found["weight_zero_point"] = scale_shape, ("I8",)
        return found | dict(self.others)

    def arrays(self, tensors: dict[str, np.ndarray]) -> QuantizedArrays:
        """Returns the arrays of a quantized weight; see StoredMatrix."""
        weight = tensors["weight"]
        values = np.ascontiguousarray(weight.view(np.uint8).T).view(weight.dtype)

        def by_group(x: np.ndarray) -> np.ndarray:
            columns = len(weight)
            if self.block is not None:
                return np.repeat(x.T, self.block[0], axis=1)[:, :columns]
            return np.broadcast_to(x, (1, columns)) if x.size == 1 else x.reshape(columns, -1).T

        scales = np.ascontiguousarray(by_group(np.asarray(tensors[self.scale])))
        zeros = np.ascontiguousarray(by_group(tensors["weight_zero_point"])) if self.has_zeros else None
        return QuantizedArrays(values, scales, zeros)


@dataclasses.dataclass(frozen=True)
class CompressedFormat:
    """compressed-tensors and fp8. The tensors of each module show which layout its matrix has.

    Args:
        block: Number of columns and rows in a block with one scale; None if there are no blocks.
    """

    block: tuple[int, int] | None = None

    def scheme(self, found: Mapping[str, Header], rows: int, columns: int) -> QuantizationScheme | None:
        """Returns the quantization scheme of a weight matrix; see WeightFormat."""
        has_zeros, is_ordered = "weight_zero_point" in found, "weight_g_idx" in found
        if "weight_packed" in found:
            scale = found.get("weight_scale")
            num_groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 1
            source = PackedInt4Matrix(num_groups, has_zeros, is_ordered)
            group_size = _group_size(rows, num_groups)
            return QuantizationScheme(
                "uint8", group_size, source, _scales(found, "weight_scale"), True, is_ordered
            )
        weight = found.get("weight")
        if weight is None or weight.dtype not in BYTES:
            return None
        name = "weight_scale_inv" if "weight_scale_inv" in found else "weight_scale"
        scale_shape = found[name].shape if name in found else (columns, 1)
        num_groups = scale_shape[1] if len(scale_shape) == 2 else 1
        group_size = _group_size(rows, num_groups) if self.block is None else self.block[1]
        others = tuple(
            (end, (found[end].shape, (found[end].dtype,)))
            for end in ("activation_scale", "input_scale", "input_zero_point")
            if end in found
        )
        source = EightBitMatrix(weight.dtype, name, scale_shape, self.block, has_zeros, others)
        return QuantizationScheme(BYTES[weight.dtype], group_size, source, _scales(found, name), has_zeros)


def _scales(found: Mapping[str, Header], name: str) -> str:
    """Returns the dtype of the scales. An unsupported dtype is reported later, with the shapes."""
    return FLOATS.get(found[name].dtype, "float32") if name in found else "float32"


def _groups(rows: int, group_size: int | None) -> int:
    return 1 if group_size is None else -(-rows // group_size)


def _group_size(rows: int, num_groups: int) -> int:
    if not num_groups or rows % num_groups:
        raise ValueError(f"the number of groups must divide the {rows} rows, got {num_groups}")
    return rows // num_groups


def _checked_groups(groups: Int[np.ndarray, " i"], num_groups: int) -> Int[np.ndarray, " i"]:
    outside = groups[(groups < 0) | (groups >= num_groups)]
    if outside.size:
        raise ValueError(f"each group of g_idx must be in [0, {num_groups - 1}], got {outside[0]}")
    return np.asarray(groups)


def _unpacked(words: Int[np.ndarray, "n w"], positions: list[int] | None = None) -> UInt8[np.ndarray, "n c"]:
    """Returns the eight 4-bit numbers of each word, uint8 [n, 8 * w].

    The order within a word is from the lowest bits to the highest, unless `positions` gives another order.
    """
    pairs = np.ascontiguousarray(words).view(np.uint8)
    numbers = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(words), -1, 8)
    return (numbers if positions is None else numbers[..., positions]).reshape(len(words), -1)
