"""Blocks and state slots: copied inside the pool, swapped to host memory and back."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.models.attention import POOL_SPEC
from jax_paged.pallas_kernels import ops
from jax_paged.worker.compilation.programs import Program, TraceContext

# The dimension of the pool's arrays that is divided: kv heads.
_HEADS = 2
# Blocks that one call moves; the last call of a step is padded.
SWAP_BLOCKS = 32
FEW_COPIES = 8
# The same of slots: one may be as large as a thousand blocks.
SWAP_SLOTS = 2


@dataclasses.dataclass(frozen=True)
class CopyProgram(Program):
    """Copies up to num_copies blocks, or slots of states, inside the pool, which is donated."""

    num_copies: int
    of_states: bool = False

    def __str__(self) -> str:
        return f"copy {'states ' * self.of_states}{self.num_copies}"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        own = _own_arrays(context, of_states=self.of_states)
        copy: Callable[[Array, Array, Array], Array] = _copy_slots
        if not self.of_states:
            copy = functools.partial(ops.copy_blocks, backend=context.backend)
            if context.grid is not None:
                copy = context.grid.on_each(copy, (POOL_SPEC, PartitionSpec(), PartitionSpec()), POOL_SPEC)

        def copy_all(pool: list[Array], src: Array, dst: Array) -> list[Array]:
            pool = list(pool)
            pool[own] = [copy(x, src, dst) for x in pool[own]]
            return pool

        pool, ids = context.kv_cache(), context.shape((self.num_copies,), jnp.int32)
        jitted = jax.jit(copy_all, donate_argnums=0, out_shardings=[context.pool_sharding] * len(pool))
        return jitted.trace(pool, ids, ids)


@dataclasses.dataclass(frozen=True)
class SwapOutProgram(Program):
    """Gathers SWAP_BLOCKS blocks (or SWAP_SLOTS slots) of the pool, on a GPU into host memory."""

    of_states: bool = False

    def __str__(self) -> str:
        return "swap out" + " states" * self.of_states

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        on_host = context.pool_sharding
        if on_host is not None and jax.default_backend() != "cpu":
            on_host = on_host.with_memory_kind("pinned_host")

        own = _own_arrays(context, of_states=self.of_states)

        def gather(pool: list[Array], src: Array) -> list[Array]:
            return [x.at[src].get(mode="clip") for x in pool[own]]

        pool = context.kv_cache()
        ids = context.shape((SWAP_SLOTS if self.of_states else SWAP_BLOCKS,), jnp.int32)
        return jax.jit(gather, out_shardings=[on_host] * len(pool[own])).trace(pool, ids)


@dataclasses.dataclass(frozen=True)
class SwapInProgram(Program):
    """Scatters SWAP_BLOCKS blocks (or SWAP_SLOTS slots) into the pool, which is donated."""

    of_states: bool = False

    def __str__(self) -> str:
        return "swap in" + " states" * self.of_states

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        own = _own_arrays(context, of_states=self.of_states)

        def scatter(pool: list[Array], blocks: list[Array], dst: Array) -> list[Array]:
            pool = list(pool)
            pool[own] = [x.at[dst].set(b, mode="drop") for x, b in zip(pool[own], blocks, strict=True)]
            return pool

        num_moved = SWAP_SLOTS if self.of_states else SWAP_BLOCKS
        moved = context.states(num_moved) if self.of_states else context.pool(num_moved)
        pool, ids = context.kv_cache(), context.shape((num_moved,), jnp.int32)
        jitted = jax.jit(scatter, donate_argnums=0, out_shardings=[context.pool_sharding] * len(pool))
        return jitted.trace(pool, moved, ids)


def _own_arrays(context: TraceContext, *, of_states: bool) -> slice:
    """Returns which arrays of the pool programs move something of; they return the others as they are."""
    num_pools = len(context.pool())
    return slice(num_pools, None) if of_states else slice(num_pools)


def _copy_slots(states: Array, src: Array, dst: Array) -> Array:
    return states.at[dst].set(states.at[src].get(mode="clip"), mode="drop")


class BlockMover:
    """Moves many blocks per call.

    Args:
        num_blocks: Of the pool.
        max_copies: Maximum copies that one call makes.
        store: Keeps blocks in host memory, as HostBlocks.store does; None if nothing is swapped.
        load: Brings them back, as HostBlocks.load does.
        of_states: Whether it moves slots of states, and no blocks: then these are meant everywhere here.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        max_copies: int,
        store: Callable[..., None] | None,
        load: Callable[[np.ndarray], list[Array]] | None,
        of_states: bool = False,
    ) -> None:
        self._num_blocks, self._store, self._load = num_blocks, store, load
        self._of_states, self._num_swapped = of_states, SWAP_SLOTS if of_states else SWAP_BLOCKS
        sizes = {1, max_copies} if of_states else {FEW_COPIES, max_copies}
        self._copies = [CopyProgram(n, of_states) for n in sorted(sizes)]

    @property
    def programs(self) -> list[Program]:
        """The programs that the methods below run."""
        kind = self._of_states
        swaps = [SwapOutProgram(kind), SwapInProgram(kind)] if self._store else []
        return [*self._copies, *swaps]

    def move(self, run: Callable[..., Any], pool: list[Array], step: SchedulerOutput) -> list[Array]:
        """Swaps and copies the blocks of a step; returns the pool, which is donated.

        In this order: blocks that are swapped out may be taken again in the same step.
        """
        swap_out, swap_in, copies = step.blocks_to_swap_out, step.blocks_to_swap_in, step.blocks_to_copy
        if self._of_states:
            swap_out, swap_in, copies = map(tuple, step.state_moves)
        if swap_out:
            self.swap_out(run, pool, swap_out)
        if swap_in:
            pool = self.swap_in(run, pool, swap_in)
        return self.copy(run, pool, copies) if copies else pool

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
        n, program = self._num_swapped, SwapOutProgram(self._of_states)
        chunks = [pairs[i : i + n] for i in range(0, len(pairs), n)]
        gathered = [run(program, pool, self._columns(c, n, 0, 0)[0]) for c in chunks]
        assert self._store is not None, "there are blocks in host memory"
        for chunk, blocks in zip(chunks, gathered, strict=True):
            self._store(np.array([host for _, host in chunk], np.int32), blocks)

    def swap_in(
        self, run: Callable[..., Any], pool: list[Array], pairs: tuple[tuple[int, int], ...]
    ) -> list[Array]:
        """Copies (host block, device block) pairs back; returns the pool, which is donated."""
        assert self._load is not None, "there are blocks in host memory"
        n, program = self._num_swapped, SwapInProgram(self._of_states)
        for i in range(0, len(pairs), n):
            src, dst = self._columns(pairs[i : i + n], n, 0, self._num_blocks)
            pool = run(program, pool, self._load(src), dst)
        return pool

    def _columns(
        self, pairs: tuple[tuple[int, int], ...], size: int, pad_from: int, pad_to: int
    ) -> list[np.ndarray]:
        """Returns the two columns of the pairs, padded."""
        columns = np.array([*pairs, *[(pad_from, pad_to)] * (size - len(pairs))], np.int32).T
        return [np.ascontiguousarray(c) for c in columns]


class HostBlocks:
    """Owns host memory for the part of each block that lies on this process's devices.

    Args:
        shapes: Of the arrays of the pool, with as many blocks as host memory has, and where they lie.

    Attributes:
        arrays: Host memory, an array per array of the pool; it is taken as it is written to.
    """

    def __init__(self, shapes: list[jax.ShapeDtypeStruct]) -> None:
        self._shapes = shapes
        self.arrays: list[np.ndarray] = []
        self._first = 0
        for shape in shapes:
            parts = shape.sharding.addressable_devices_indices_map(shape.shape).values()
            heads = [part[_HEADS].indices(shape.shape[_HEADS])[:2] for part in parts if part]
            self._first, end = min(first for first, _ in heads), max(end for _, end in heads)
            local = (*shape.shape[:_HEADS], end - self._first, *shape.shape[_HEADS + 1 :])
            self.arrays.append(np.empty(local, shape.dtype))

    def store(self, places: Int[np.ndarray, " n"], blocks: list[Array]) -> None:
        """Waits for blocks and keeps them.

        Args:
            places: Where in host memory.
            blocks: Per array of the pool, as many blocks or more.
        """
        for memory, array in zip(self.arrays, blocks, strict=True):
            for shard in array.addressable_shards:
                heads = self._local(shard.index, array.shape)
                memory[places, :, heads] = np.asarray(shard.data)[: len(places)]

    def load(self, places: Int[np.ndarray, " n"]) -> list[Array]:
        """Returns what is kept in some places, on the devices, per array of the pool."""
        arrays = []
        for memory, whole in zip(self.arrays, self._shapes, strict=True):
            taken, shape = memory[places], (len(places), *whole.shape[1:])

            def part(index: Any, taken: np.ndarray = taken, shape: tuple[int, ...] = shape) -> np.ndarray:
                return taken[:, :, self._local(index, shape)]

            arrays.append(jax.make_array_from_callback(shape, whole.sharding, part))
        return arrays

    def _local(self, index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
        """Returns the heads of a device in this process's memory, of the index of its part of all."""
        first, end, _ = index[_HEADS].indices(shape[_HEADS])
        return slice(first - self._first, end - self._first)
