"""Quantization of float weights to 4 bits on a CPU.

The method is described in models/quantization/online.py, which computes the same with XLA if the native
library cannot be used. The results may differ where sums in another order are rounded differently.
"""

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float

from jax_paged.pallas_kernels import native


def quantize_groups(groups: Float[np.ndarray, "n k"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantizes groups of numbers to 4 bits per number, in the calling thread and without Python's lock.

    Args:
        groups: float32 or bfloat16 [N, K], each row a group of 16, 32 or 64 numbers.

    Returns:
        uint8 [N, K / 2], the numbers of each group, with two consecutive ones in a byte; bfloat16 [N], the
        scales; bfloat16 [N], the offsets.
    """
    num, size = groups.shape
    groups = np.ascontiguousarray(groups)
    if groups.dtype not in (np.float32, ml_dtypes.bfloat16):
        raise ValueError(f"`groups` must be float32 or bfloat16, got {groups.dtype}")
    values = np.empty((num, size // 2), np.uint8)
    scales, offsets = (np.empty(num, ml_dtypes.bfloat16) for _ in range(2))

    def pointer(array: np.ndarray) -> Any:
        return ctypes.c_void_p(array.ctypes.data)

    failed = native.library().jax_paged_quantize_int4(
        pointer(groups),
        ctypes.c_int32(groups.dtype != np.float32),
        ctypes.c_int64(num),
        ctypes.c_int64(size),
        *(pointer(array) for array in (values, scales, offsets)),
    )
    if failed:
        raise ValueError(f"`groups` must have rows of 16, 32 or 64 numbers, got {size}")
    return values, scales, offsets
