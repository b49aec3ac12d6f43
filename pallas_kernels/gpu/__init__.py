"""Mosaic GPU (Pallas) kernels for NVIDIA GPUs of compute capability 8.x, 9.x, 10.x and 12.x.

Each operation has a module with a function of the same name, which ops.py or grouped_matmul.py calls:
`write_kv`, `copy_blocks`, `paged_decode` (with `cascade` for shared prefixes), `ragged_prefill` and
`grouped_wgmma`. `tuning` has helpers for all of them, such as the properties of the target GPU.
`quantized_tile` reads quantized pools. All kernels also run in JAX's interpreter on a CPU, with race
detection (`interpret=True`).
"""
