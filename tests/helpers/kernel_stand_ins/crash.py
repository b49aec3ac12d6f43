"""Kernels that end their process, as an access to memory that is not there does."""

import os
import signal

import jax

from jax_paged.pallas_kernels.xla import copy_blocks, paged_decode, write_kv
from jax_paged.pallas_kernels.xla import ragged_attention as right

__all__ = ["copy_blocks", "paged_decode", "ragged_attention", "write_kv"]


def _crash(x):
    os.kill(os.getpid(), signal.SIGSEGV)
    return x


def ragged_attention(q, *args, **options):
    return right(jax.pure_callback(_crash, jax.ShapeDtypeStruct(q.shape, q.dtype), q), *args, **options)
