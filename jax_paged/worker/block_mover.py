"""Blocks on the move: copy-on-write inside the pool, and swapping between the pool and host memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_paged.models.attention import Backend
from jax_paged.pallas_kernels import ops
from jax_paged.worker.kv_cache import KVCacheLayout, kv_cache_sharding

# Blocks that one call moves; the last call of a step is padded.
SWAP_BLOCKS = 32
FEW_COPIES = 8


class BlockMover:
    """Owns the host memory of swapped blocks; gathers and scatters many blocks a call, in place.

    Args:
        layout: Of the pool.
        num_blocks: Of the pool.
        num_swap_blocks: Of host memory.
        block_size: Tokens a block.
        dtype: Of the pool.
        max_copies: Copies that one call makes at most.
        mesh: Where the pool lies.
        backend: Which kernels copy.
    """

    def __init__(
        self,
        *,
        layout: KVCacheLayout,
        num_blocks: int,
        num_swap_blocks: int,
        block_size: int,
        dtype: jnp.dtype,
        max_copies: int,
        mesh: Mesh,
        backend: Backend,
    ) -> None:
        self._layout, self._num_blocks, self._block_size = layout, num_blocks, block_size
        self._dtype = dtype
        self._backend: Backend = backend
        self._sharding, self._replicated = kv_cache_sharding(mesh), NamedSharding(mesh, PartitionSpec())
        self._copy_sizes = sorted({FEW_COPIES, max_copies})
        # One more than can be swapped: block 0 stays unused. Memory is taken as it is written to.
        shape = layout.pool_shape(num_swap_blocks + 1, block_size)
        self._host = [np.empty(shape, dtype) for _ in range(layout.num_pools if num_swap_blocks else 0)]

    @property
    def programs(self) -> list[str]:
        """Names of the programs that `lower` makes and the methods below take."""
        swaps = ["swap out", "swap in"] if self._host else []
        return [f"copy {n}" for n in self._copy_sizes] + swaps

    def lower(self, program: str) -> jax.stages.Lowered:
        """Traces and lowers one of the programs."""
        shape = self._layout.pool_shape(self._num_blocks, self._block_size)
        pool_shape = jax.ShapeDtypeStruct(shape, self._dtype, sharding=self._sharding)
        pool = [pool_shape] * self._layout.num_pools

        def ids(n: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((n,), jnp.int32, sharding=self._replicated)

        if program == "swap out":
            on_host = self._sharding
            if jax.default_backend() != "cpu":
                on_host = self._sharding.with_memory_kind("pinned_host")

            def gather(pool: list[Array], src: Array) -> list[Array]:
                return [x.at[src].get(mode="clip") for x in pool]

            return jax.jit(gather, out_shardings=[on_host] * len(pool)).trace(pool, ids(SWAP_BLOCKS)).lower()
        if program == "swap in":

            def scatter(pool: list[Array], blocks: list[Array], dst: Array) -> list[Array]:
                return [x.at[dst].set(b, mode="drop") for x, b in zip(pool, blocks, strict=True)]

            shape = self._layout.pool_shape(SWAP_BLOCKS, self._block_size)
            blocks = [jax.ShapeDtypeStruct(shape, self._dtype, sharding=self._sharding)] * len(pool)
            jitted = jax.jit(scatter, donate_argnums=0, out_shardings=[self._sharding] * len(pool))
            return jitted.trace(pool, blocks, ids(SWAP_BLOCKS)).lower()

        def copy(pool: list[Array], src: Array, dst: Array) -> list[Array]:
            return [ops.copy_blocks(x, src, dst, backend=self._backend) for x in pool]

        n = int(program.removeprefix("copy "))
        jitted = jax.jit(copy, donate_argnums=0, out_shardings=[self._sharding] * len(pool))
        return jitted.trace(pool, ids(n), ids(n)).lower()

    def copy(
        self, run: Callable[..., Any], pool: list[Array], pairs: tuple[tuple[int, int], ...]
    ) -> list[Array]:
        """Copies (from, to) blocks inside the pool; returns the pool.

        Args:
            run: Runs a program, by its name and arguments.
            pool: Donated.
            pairs: No block is read and written.
        """
        while pairs:
            size = next((n for n in self._copy_sizes if n >= len(pairs)), self._copy_sizes[-1])
            src, dst = self._columns(pairs[:size], size, self._num_blocks, self._num_blocks)
            pool = run(f"copy {size}", pool, src, dst)
            pairs = pairs[size:]
        return pool

    def swap_out(
        self, run: Callable[..., Any], pool: list[Array], pairs: tuple[tuple[int, int], ...]
    ) -> None:
        """Copies (device block, host block) pairs to host memory."""
        chunks = [pairs[i : i + SWAP_BLOCKS] for i in range(0, len(pairs), SWAP_BLOCKS)]
        gathered = [run("swap out", pool, self._columns(c, SWAP_BLOCKS, 0, 0)[0]) for c in chunks]
        for chunk, blocks in zip(chunks, gathered, strict=True):
            to = [host for _, host in chunk]
            for memory, moved in zip(self._host, blocks, strict=True):
                memory[to] = np.asarray(moved)[: len(chunk)]

    def swap_in(
        self, run: Callable[..., Any], pool: list[Array], pairs: tuple[tuple[int, int], ...]
    ) -> list[Array]:
        """Copies (host block, device block) pairs back; returns the pool, which is donated."""
        for i in range(0, len(pairs), SWAP_BLOCKS):
            chunk = pairs[i : i + SWAP_BLOCKS]
            src = [host for host, _ in chunk] + [0] * (SWAP_BLOCKS - len(chunk))
            blocks = jax.device_put([memory[src] for memory in self._host], self._sharding)
            pool = run("swap in", pool, blocks, self._columns(chunk, SWAP_BLOCKS, 0, self._num_blocks)[1])
        return pool

    def _columns(
        self, pairs: tuple[tuple[int, int], ...], size: int, pad_from: int, pad_to: int
    ) -> list[Array]:
        """Returns the two columns of the pairs, padded."""
        columns = np.array([*pairs, *[(pad_from, pad_to)] * (size - len(pairs))], np.int32).T
        return jax.device_put([np.ascontiguousarray(c) for c in columns], self._replicated)
