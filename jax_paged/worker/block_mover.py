"""Blocks on the move: copy-on-write inside the pool, and swapping between the pool and host memory."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.models.attention import POOL_SPEC
from jax_paged.pallas_kernels import ops
from jax_paged.worker.kv_cache import KVCacheLayout, kv_cache_sharding
from jax_paged.worker.programs import Program, TraceContext

# Blocks that one call moves; the last call of a step is padded.
SWAP_BLOCKS = 32
FEW_COPIES = 8


@dataclasses.dataclass(frozen=True)
class CopyProgram(Program):
    """Copies up to num_copies blocks inside the pool, which is donated."""

    num_copies: int

    def __str__(self) -> str:
        return f"copy {self.num_copies}"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        def copy_all(pool: list[Array], src: Array, dst: Array) -> list[Array]:
            copy = functools.partial(ops.copy_blocks, backend=context.backend)
            if context.grid is not None:
                copy = context.grid.on_each(copy, (POOL_SPEC, PartitionSpec(), PartitionSpec()), POOL_SPEC)
            return [copy(x, src, dst) for x in pool]

        pool, ids = context.pool(), context.shape((self.num_copies,), jnp.int32)
        jitted = jax.jit(copy_all, donate_argnums=0, out_shardings=[context.pool_sharding] * len(pool))
        return jitted.trace(pool, ids, ids)


@dataclasses.dataclass(frozen=True)
class SwapOutProgram(Program):
    """Gathers SWAP_BLOCKS blocks of the pool, on a GPU into host memory."""

    def __str__(self) -> str:
        return "swap out"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        on_host = context.pool_sharding
        if on_host is not None and jax.default_backend() != "cpu":
            on_host = on_host.with_memory_kind("pinned_host")

        def gather(pool: list[Array], src: Array) -> list[Array]:
            return [x.at[src].get(mode="clip") for x in pool]

        pool, ids = context.pool(), context.shape((SWAP_BLOCKS,), jnp.int32)
        return jax.jit(gather, out_shardings=[on_host] * len(pool)).trace(pool, ids)


@dataclasses.dataclass(frozen=True)
class SwapInProgram(Program):
    """Scatters SWAP_BLOCKS blocks into the pool, which is donated."""

    def __str__(self) -> str:
        return "swap in"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        def scatter(pool: list[Array], blocks: list[Array], dst: Array) -> list[Array]:
            return [x.at[dst].set(b, mode="drop") for x, b in zip(pool, blocks, strict=True)]

        pool, ids = context.pool(), context.shape((SWAP_BLOCKS,), jnp.int32)
        jitted = jax.jit(scatter, donate_argnums=0, out_shardings=[context.pool_sharding] * len(pool))
        return jitted.trace(pool, context.pool(SWAP_BLOCKS), ids)


class BlockMover:
    """Owns the host memory of swapped blocks; moves many blocks per call.

    Args:
        layouts: Of the arrays of the pool, in their order.
        num_blocks: Of the pool.
        num_swap_blocks: Of host memory.
        block_size: Tokens per block.
        max_copies: Maximum copies that one call makes.
        mesh: Where the pool lies.

    Attributes:
        host: Host memory, an array per array of the pool; without swap blocks none.
    """

    def __init__(
        self,
        *,
        layouts: tuple[KVCacheLayout, ...],
        num_blocks: int,
        num_swap_blocks: int,
        block_size: int,
        max_copies: int,
        mesh: Mesh | AbstractMesh,
    ) -> None:
        self._num_blocks = num_blocks
        self._sharding, self._replicated = kv_cache_sharding(mesh), NamedSharding(mesh, PartitionSpec())
        self._copies = [CopyProgram(n) for n in sorted({FEW_COPIES, max_copies})]
        # One more than can be swapped: block 0 stays unused. Memory is taken as it is written to.
        self.host = [
            np.empty(layout.pool_shape(num_swap_blocks + 1, block_size), layout.dtype)
            for layout in layouts
            for _ in range(layout.num_pools if num_swap_blocks else 0)
        ]

    @property
    def programs(self) -> list[Program]:
        """The programs that the methods below run."""
        swaps = [SwapOutProgram(), SwapInProgram()] if self.host else []
        return [*self._copies, *swaps]

    def move(self, run: Callable[..., Any], pool: list[Array], step: SchedulerOutput) -> list[Array]:
        """Swaps and copies the blocks of a step; returns the pool, which is donated.

        In this order: blocks that are swapped out may be taken again in the same step.
        """
        if step.blocks_to_swap_out:
            self.swap_out(run, pool, step.blocks_to_swap_out)
        if step.blocks_to_swap_in:
            pool = self.swap_in(run, pool, step.blocks_to_swap_in)
        if step.blocks_to_copy:
            pool = self.copy(run, pool, step.blocks_to_copy)
        return pool

    def copy(
        self, run: Callable[..., Any], pool: list[Array], pairs: tuple[tuple[int, int], ...]
    ) -> list[Array]:
        """Copies (from, to) blocks inside the pool; returns the pool.

        Args:
            run: Runs a program on arguments.
            pool: Donated.
            pairs: No block is read and written.
        """
        while pairs:
            program = next((p for p in self._copies if p.num_copies >= len(pairs)), self._copies[-1])
            size = program.num_copies
            src, dst = self._columns(pairs[:size], size, self._num_blocks, self._num_blocks)
            pool = run(program, pool, src, dst)
            pairs = pairs[size:]
        return pool

    def swap_out(
        self, run: Callable[..., Any], pool: list[Array], pairs: tuple[tuple[int, int], ...]
    ) -> None:
        """Copies (device block, host block) pairs to host memory; waits until they are there."""
        chunks = [pairs[i : i + SWAP_BLOCKS] for i in range(0, len(pairs), SWAP_BLOCKS)]
        gathered = [run(SwapOutProgram(), pool, self._columns(c, SWAP_BLOCKS, 0, 0)[0]) for c in chunks]
        for chunk, blocks in zip(chunks, gathered, strict=True):
            to = [host for _, host in chunk]
            for memory, moved in zip(self.host, blocks, strict=True):
                memory[to] = np.asarray(moved)[: len(chunk)]

    def swap_in(
        self, run: Callable[..., Any], pool: list[Array], pairs: tuple[tuple[int, int], ...]
    ) -> list[Array]:
        """Copies (host block, device block) pairs back; returns the pool, which is donated."""
        for i in range(0, len(pairs), SWAP_BLOCKS):
            chunk = pairs[i : i + SWAP_BLOCKS]
            src = [host for host, _ in chunk] + [0] * (SWAP_BLOCKS - len(chunk))
            blocks = jax.device_put([memory[src] for memory in self.host], self._sharding)
            dst = self._columns(chunk, SWAP_BLOCKS, 0, self._num_blocks)[1]
            pool = run(SwapInProgram(), pool, blocks, dst)
        return pool

    def _columns(
        self, pairs: tuple[tuple[int, int], ...], size: int, pad_from: int, pad_to: int
    ) -> list[Array]:
        """Returns the two columns of the pairs, padded."""
        columns = np.array([*pairs, *[(pad_from, pad_to)] * (size - len(pairs))], np.int32).T
        return jax.device_put([np.ascontiguousarray(c) for c in columns], self._replicated)
