"""Kernels of which one result has one element that is slightly wrong."""

from jax_paged.pallas_kernels.xla import copy_blocks, ragged_attention, write_kv
from jax_paged.pallas_kernels.xla import paged_decode as right

__all__ = ["copy_blocks", "paged_decode", "ragged_attention", "write_kv"]


def paged_decode(q, kv_pages, block_tables, context_lens, **options):
    out = right(q, kv_pages, block_tables, context_lens, **options)
    return out.at[2, -1, 3].multiply(1.01)
