"""Kernels of which those for experts are the real ones, in the interpreter."""

import functools

from jax_paged.pallas_kernels.gpu import grouped_wgmma
from jax_paged.pallas_kernels.xla import copy_blocks, paged_decode, ragged_attention, write_kv

__all__ = ["copy_blocks", "grouped_matmul", "paged_decode", "ragged_attention", "write_kv"]

grouped_matmul = functools.partial(grouped_wgmma.grouped_matmul, interpret=True)
