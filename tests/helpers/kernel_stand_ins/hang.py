"""Kernels that never end, with a process of their own that does not end either."""

import os
import subprocess
from pathlib import Path

from jax import lax

from jax_paged.pallas_kernels.xla import copy_blocks, ragged_attention, write_kv
from jax_paged.pallas_kernels.xla import paged_decode as right

__all__ = ["copy_blocks", "paged_decode", "ragged_attention", "write_kv"]

if "STAND_IN_PIDS" in os.environ:
    sleeper = subprocess.Popen(["sleep", "1000"])
    Path(os.environ["STAND_IN_PIDS"]).write_text(f"{os.getpid()} {sleeper.pid}")


def paged_decode(q, kv_pages, block_tables, context_lens, **options):
    # Inside of XLA, where no Python signal handler runs.
    zero = lax.while_loop(lambda i: i >= 0, lambda i: (i + 1) & 1023, context_lens[0] & 0)
    return right(q + zero.astype(q.dtype), kv_pages, block_tables, context_lens, **options)
