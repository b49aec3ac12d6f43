"""Blocks on the move: copy-on-write inside the pool, and swapping between the pool and host memory."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.models.attention import POOL_SPEC
from jax_paged.pallas_kernels import ops
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
    """Moves many blocks per call.

    Args:
        num_blocks: Of the pool.
        max_copies: Maximum copies that one call makes.
        store: Keeps blocks in host memory, as HostBlocks.store does; None if nothing is swapped.
        load: Brings them back, as HostBlocks.load does.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        max_copies: int,
        store: Callable[..., None] | None,
        load: Callable[[np.ndarray], list[Array]] | None,
    ) -> None:
        self._num_blocks, self._store, self._load = num_blocks, store, load
        self._copies = [CopyProgram(n) for n in sorted({FEW_COPIES, max_copies})]

    @property
    def programs(self) -> list[Program]:
        """The programs that the methods below run."""
        swaps = [SwapOutProgram(), SwapInProgram()] if self._store else []
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
        assert self._store is not None, "there are blocks in host memory"
        for chunk, blocks in zip(chunks, gathered, strict=True):
            self._store(np.array([host for _, host in chunk], np.int32), blocks)

    def swap_in(
        self, run: Callable[..., Any], pool: list[Array], pairs: tuple[tuple[int, int], ...]
    ) -> list[Array]:
        """Copies (host block, device block) pairs back; returns the pool, which is donated."""
        assert self._load is not None, "there are blocks in host memory"
        for i in range(0, len(pairs), SWAP_BLOCKS):
            src, dst = self._columns(pairs[i : i + SWAP_BLOCKS], SWAP_BLOCKS, 0, self._num_blocks)
            pool = run(SwapInProgram(), pool, self._load(src), dst)
        return pool

    def _columns(
        self, pairs: tuple[tuple[int, int], ...], size: int, pad_from: int, pad_to: int
    ) -> list[np.ndarray]:
        """Returns the two columns of the pairs, padded."""
        columns = np.array([*pairs, *[(pad_from, pad_to)] * (size - len(pairs))], np.int32).T
        return [np.ascontiguousarray(c) for c in columns]
