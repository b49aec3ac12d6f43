"""Mosaic GPU (Pallas) kernels for NVIDIA GPUs of compute capability 8.x, 9.x, 10.x and 12.x.

ops.py and grouped_matmul.py call one function per operation: in `write_kv`, `copy_blocks`, `paged_decode`
(`cascade` with shared prefixes), `ragged_prefill` (ragged_attention) and `grouped_wgmma` (grouped_matmul).
`tuning` has helpers for all of them, such as the properties of the target GPU. `quantized_tile` reads
quantized pools. With `interpret=True`, the kernels run as for sm_90 in JAX's interpreter on a CPU, with race
detection.
"""
