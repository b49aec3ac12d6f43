"""Kernels that are right, whose experts take their time."""

import time

import jax

from jax_paged.pallas_kernels import grouped_loop
from jax_paged.pallas_kernels.xla import copy_blocks, paged_decode, ragged_attention, write_kv

__all__ = ["copy_blocks", "grouped_matmul", "paged_decode", "ragged_attention", "write_kv"]


def _wait(x):
    time.sleep(0.02)
    return x


def grouped_matmul(x, kernels, group_sizes):
    x = jax.pure_callback(_wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return grouped_loop.grouped_matmul(x, kernels, group_sizes)
