"""Arithmetic on the 32 lanes of a warp, as the PTX ISA has it."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

TYPES: dict[str, Any] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32, "b64": np.uint64,
    "u64": np.uint64, "s64": np.int64, "pred": np.bool_, "bf16": ml_dtypes.bfloat16, "f16": np.float16,
}  # fmt: skip

# Of arrays [32] that have the opcode's last type, but for the counts of shifts.
Function = Callable[..., np.ndarray]


def multiply_high(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    size = x.dtype.itemsize
    wide = object if size == 8 else f"{x.dtype.kind}{2 * size}"
    return ((x.astype(wide) * y.astype(wide)) >> 8 * size).astype(x.dtype)


def shift_left(x: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Counts are uint32; those past the width leave 0."""
    bits = 8 * x.dtype.itemsize
    shifted = np.left_shift(x, np.minimum(count, bits - 1).astype(x.dtype))
    return np.where(count < bits, shifted, x.dtype.type(0))


def shift_right(x: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Counts are uint32; those past the width leave the sign, or 0."""
    bits = 8 * x.dtype.itemsize
    shifted = np.right_shift(x, np.minimum(count, bits - 1).astype(x.dtype))
    return shifted if x.dtype.kind == "i" else np.where(count < bits, shifted, x.dtype.type(0))


def _tanh_approx(x: np.ndarray) -> np.ndarray:
    """tanh.approx has a relative error of up to 2 to the -11: here always as much."""
    exact = np.tanh(x.astype(np.float64))
    return (exact * (1 + 2.0**-11 * np.where(np.arange(32) % 2, 1, -1))).astype(np.float32)


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)


def _compare_floats(name: str) -> Function:
    if name == "ne":  # false of NaN, which NumPy's is not
        return lambda x, y: (x < y) | (x > y)
    if name.endswith("u"):  # true of NaN
        return lambda x, y: COMPARISONS[name[:-1]](x, y) | np.isnan(x) | np.isnan(y)
    return COMPARISONS[name]


COMPARISONS: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip


def comparison(name: str, kind: str) -> Function:
    """Returns what setp compares with.

    Raises:
        KeyError: If it is not known.
    """
    return _compare_floats(name) if "f" in kind else COMPARISONS[name]


INTEGERS = {"s16", "u16", "s32", "u32", "s64", "u64"}
BITS = {"b16", "b32", "b64", "pred"}
ALU: dict[str, tuple[Function, set[str]]] = {
    "add": (np.add, INTEGERS | {"f32"}),
    "sub": (np.subtract, INTEGERS | {"f32"}),
    "mul": (np.multiply, {"f32"}),
    "neg": (np.negative, {"s16", "s32", "s64", "f32"}),
    "not": (np.bitwise_not, BITS),
    "and": (np.bitwise_and, BITS),
    "or": (np.bitwise_or, BITS),
    "xor": (np.bitwise_xor, BITS),
    "min": (np.minimum, INTEGERS),
    "max": (np.maximum, INTEGERS),
    "fma": (_fma, {"f32", "bf16", "f16"}),
    "ex2": (np.exp2, {"f32"}),
    "rcp": (lambda x: np.float32(1) / x, {"f32"}),
    "div": (np.divide, {"f32"}),
    "tanh": (_tanh_approx, {"f32"}),
}
# With other modifiers, a function may be another.
SPECIAL: dict[tuple[str, ...], Function] = {
    ("min", "f32"): np.fmin,
    ("max", "f32"): np.fmax,
    ("min", "NaN", "f32"): np.minimum,
    ("max", "NaN", "f32"): np.maximum,
    ("ex2", "approx", "ftz", "f32"): lambda x: _flushed(np.exp2(_flushed(x))),
}


def function(opcode: tuple[str, ...]) -> Function | None:
    """Returns what an instruction computes; None if this is not known."""
    if opcode in SPECIAL:
        return SPECIAL[opcode]
    name, modifiers, kind = opcode[0], opcode[1:-1], opcode[-1]
    if name not in ALU or kind not in ALU[name][1]:
        return None
    return ALU[name][0] if set(modifiers) <= {"rn", "approx", "full"} else None
