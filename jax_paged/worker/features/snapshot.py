"""Memory contents of a saved engine state: KV blocks and weights."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_paged.pallas_kernels.native import products


def read_blocks(
    kv_cache: list[Array], host: list[np.ndarray], blocks: list[int], host_blocks: list[int]
) -> dict[str, np.ndarray]:
    """Returns the contents of blocks. The names specify the array that each part comes from.

    Args:
        kv_cache: The KV cache arrays on the device, each [blocks, ...].
        host: The KV cache arrays in host memory.
        blocks: Ids of device blocks.
        host_blocks: Ids of host blocks.
    """
    taken = {f"pool.{i}": np.asarray(pool[jnp.array(blocks, jnp.int32)]) for i, pool in enumerate(kv_cache)}
    return taken | {f"host.{i}": memory[host_blocks] for i, memory in enumerate(host)}


def write_blocks(
    kv_cache: list[Array],
    host: list[np.ndarray],
    blocks: list[int],
    host_blocks: list[int],
    arrays: dict[str, np.ndarray],
) -> None:
    """Writes the contents of blocks as returned by `read_blocks`.

    The device arrays are donated and replaced in the list `kv_cache`.

    Args:
        kv_cache: The KV cache arrays on the device.
        host: The KV cache arrays in host memory.
        blocks: Ids of device blocks.
        host_blocks: Ids of host blocks.
        arrays: The contents.

    Raises:
        ValueError: If an array is missing, or has another shape or dtype.
    """
    check_array = functools.partial(_checked, arrays)
    taken = [check_array(f"pool.{i}", (len(blocks), *x.shape[1:]), x.dtype) for i, x in enumerate(kv_cache)]
    moved = [check_array(f"host.{i}", (len(host_blocks), *x.shape[1:]), x.dtype) for i, x in enumerate(host)]
    for i, values in enumerate(taken):
        sharding = kv_cache[i].sharding
        kv_cache[i] = jax.device_put(_write(kv_cache[i], jnp.array(blocks, jnp.int32), values), sharding)
    for memory, values in zip(host, moved, strict=True):
        memory[host_blocks] = values


def read_weights(weights: list[Array]) -> dict[str, np.ndarray]:
    """Returns the served weights. Arrays of fp8, which NumPy does not support, are returned as bytes."""
    arrays = [np.asarray(weight) for weight in weights]
    return {f"weights.{i}": x.view(_saved_dtype(x.dtype)) for i, x in enumerate(arrays)}


def write_weights(weights: list[Array], arrays: dict[str, np.ndarray]) -> None:
    """Replaces the weights in a list by saved weights, as returned by `read_weights`.

    Raises:
        ValueError: If an array is missing, or has another shape or dtype.
    """
    taken = [_checked(arrays, f"weights.{i}", w.shape, _saved_dtype(w.dtype)) for i, w in enumerate(weights)]
    weights[:] = [
        jax.device_put(new.view(old.dtype), old.sharding) for new, old in zip(taken, weights, strict=True)
    ]


def fingerprint(weights: list[Array]) -> str:
    """Returns a hash of all weights in the form in which they are served, which may be packed."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(f"{weight.dtype}{weight.shape}".encode())
        digest.update(np.ascontiguousarray(np.asarray(weight)).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def packing(matmul_backend: str, dtype: jnp.dtype) -> str:
    """Returns an identifier of the packing of weights. Saved weights fit engines with an equal packing."""
    if matmul_backend != "onednn":
        return matmul_backend
    # The format of packed weights depends on the processor. The packed form of a probe identifies it.
    probe = jnp.arange(192 * 320, dtype=jnp.float32).reshape(192, 320).astype(dtype)
    return hashlib.sha256(np.asarray(products.pack(probe)).tobytes()).hexdigest()


@functools.partial(jax.jit, donate_argnums=0)
def _write(pool: Array, blocks: Array, values: Array) -> Array:
    """Returns the array with some of its blocks replaced; donates the old array."""
    return pool.at[blocks].set(values)


def _saved_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which an array is saved: uint8 for fp8."""
    return np.dtype(np.uint8) if dtype == jnp.float8_e4m3fn else dtype


def _checked(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns the array with the given name.

    Raises:
        ValueError: If it is missing, or has another shape or dtype.
    """
    found = arrays.get(name)
    if found is None or found.shape != shape or found.dtype != dtype:
        got = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
        raise ValueError(f"array {name!r} of `state` must be {dtype} {list(shape)}, got {got}")
    return found
