"""What is kept of an engine's memory when its state is saved: blocks of keys and values, and weights."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_paged.pallas_kernels.native import products


def read_blocks(
    pools: list[Array], host: list[np.ndarray], blocks: list[int], host_blocks: list[int]
) -> dict[str, np.ndarray]:
    """Returns the contents of blocks, by names that say which array of the pool they come from.

    Args:
        pools: The arrays of the pool, each [blocks, ...].
        host: Those of host memory.
        blocks: Of the pool.
        host_blocks: Of host memory.
    """
    taken = {f"pool.{i}": np.asarray(pool[jnp.array(blocks, jnp.int32)]) for i, pool in enumerate(pools)}
    return taken | {f"host.{i}": memory[host_blocks] for i, memory in enumerate(host)}


def write_blocks(
    pools: list[Array],
    host: list[np.ndarray],
    blocks: list[int],
    host_blocks: list[int],
    arrays: dict[str, np.ndarray],
) -> None:
    """Writes what read_blocks returned; replaces the arrays of the pool in its list, and donates them.

    Raises:
        ValueError: If an array is missing or of another shape or type.
    """
    check_array = functools.partial(_checked, arrays)
    taken = [check_array(f"pool.{i}", (len(blocks), *x.shape[1:]), x.dtype) for i, x in enumerate(pools)]
    moved = [check_array(f"host.{i}", (len(host_blocks), *x.shape[1:]), x.dtype) for i, x in enumerate(host)]
    for i, values in enumerate(taken):
        sharding = pools[i].sharding
        pools[i] = jax.device_put(_write(pools[i], jnp.array(blocks, jnp.int32), values), sharding)
    for memory, values in zip(host, moved, strict=True):
        memory[host_blocks] = values


def read_weights(weights: list[Array]) -> dict[str, np.ndarray]:
    """Returns the weights as they are served; those of fp8, which NumPy has no name for, as bytes."""
    arrays = [np.asarray(weight) for weight in weights]
    return {f"weights.{i}": x.view(_kept_dtype(x.dtype)) for i, x in enumerate(arrays)}


def write_weights(weights: list[Array], arrays: dict[str, np.ndarray]) -> None:
    """Replaces the weights in their list by what read_weights returned.

    Raises:
        ValueError: If an array is missing or of another shape or type.
    """
    taken = [_checked(arrays, f"weights.{i}", w.shape, _kept_dtype(w.dtype)) for i, w in enumerate(weights)]
    weights[:] = [
        jax.device_put(new.view(old.dtype), old.sharding) for new, old in zip(taken, weights, strict=True)
    ]


def fingerprint(weights: list[Array]) -> str:
    """Returns a hash of all weights as they are served: kernels that are packed, as they are packed here."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(f"{weight.dtype}{weight.shape}".encode())
        digest.update(np.ascontiguousarray(np.asarray(weight)).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def packing(matmul_backend: str, dtype: jnp.dtype) -> str:
    """Returns what tells one way of packing kernels from another: packed weights fit no other processor."""
    if matmul_backend != "onednn":
        return matmul_backend
    probe = jnp.arange(192 * 320, dtype=jnp.float32).reshape(192, 320).astype(dtype)
    return hashlib.sha256(np.asarray(products.pack(probe)).tobytes()).hexdigest()


@functools.partial(jax.jit, donate_argnums=0)
def _write(pool: Array, blocks: Array, values: Array) -> Array:
    return pool.at[blocks].set(values)


def _kept_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.uint8) if dtype == jnp.float8_e4m3fn else dtype


def _checked(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    found = arrays.get(name)
    if found is None or found.shape != shape or found.dtype != dtype:
        what = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
        raise ValueError(f"array {name!r} of `state` must be {dtype} {list(shape)}, got {what}")
    return found
