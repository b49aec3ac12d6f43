"""Paged attention and expert (mixture-of-experts) matrix products on plain JAX arrays.

`ops.py` has the four operations on the KV cache: `write_kv`, `copy_blocks`, `paged_decode` and
`ragged_attention`. `grouped_matmul.py` has the product for experts. Both check their arguments and call one
of several backends:

- `reference.py`: plain jnp code that defines the results;
- `xla.py` and `grouped_loop.py`: efficient plain JAX;
- `native/`: C++ for CPUs;
- `gpu/`: Mosaic GPU (Pallas) kernels for NVIDIA GPUs.

The model code (`models/paged_attention.py`, `models/moe.py`) calls these operations inside the jitted step.
This package imports nothing from the engine, the scheduler or the models.
"""
