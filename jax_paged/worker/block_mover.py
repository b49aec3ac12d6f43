"""Programs that copy KV blocks and recurrent state slots on the device, or swap them to host memory."""

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

# Dimension of the KV cache arrays that devices divide: kv heads.
_HEADS = 2
# Number of blocks that one call of a swap program moves. If fewer are left, the call is padded.
SWAP_BLOCKS = 32
# Number of blocks that one call of the smaller copy program copies. If fewer are left, the call is padded.
FEW_COPIES = 8
# Number of state slots that one swap moves. A slot may be as large as a thousand blocks.
SWAP_SLOTS = 2


@dataclasses.dataclass(frozen=True)
class CopyProgram(Program):
    """Program that copies up to num_copies blocks, or state slots, inside the KV cache, which is donated."""

    num_copies: int
    moves_states: bool = False

    def __str__(self) -> str:
        return f"copy {'states ' * self.moves_states}{self.num_copies}"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""
        part = _moved_arrays(context, moves_states=self.moves_states)
        copy: Callable[[Array, Array, Array], Array] = _copy_slots
        if not self.moves_states:
            copy = functools.partial(ops.copy_blocks, backend=context.backend)
            if context.grid is not None:
                copy = context.grid.shard_map(copy, (POOL_SPEC, PartitionSpec(), PartitionSpec()), POOL_SPEC)

        def copy_all(arrays: list[Array], src: Array, dst: Array) -> list[Array]:
            arrays = list(arrays)
            arrays[part] = [copy(x, src, dst) for x in arrays[part]]
            return arrays

        kv_cache, ids = context.kv_cache(), context.shape((self.num_copies,), jnp.int32)
        jitted = jax.jit(copy_all, donate_argnums=0, out_shardings=[context.pool_sharding] * len(kv_cache))
        return jitted.trace(kv_cache, ids, ids)


@dataclasses.dataclass(frozen=True)
class SwapOutProgram(Program):
    """Program that gathers SWAP_BLOCKS blocks (or SWAP_SLOTS state slots) from the KV cache.

    On a GPU the results are in pinned host memory.
    """

    moves_states: bool = False

    def __str__(self) -> str:
        return "swap out" + " states" * self.moves_states

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""
        on_host = context.pool_sharding
        if on_host is not None and jax.default_backend() != "cpu":
            on_host = on_host.with_memory_kind("pinned_host")

        part = _moved_arrays(context, moves_states=self.moves_states)

        def gather(arrays: list[Array], src: Array) -> list[Array]:
            return [x.at[src].get(mode="clip") for x in arrays[part]]

        kv_cache = context.kv_cache()
        ids = context.shape((SWAP_SLOTS if self.moves_states else SWAP_BLOCKS,), jnp.int32)
        return jax.jit(gather, out_shardings=[on_host] * len(kv_cache[part])).trace(kv_cache, ids)


@dataclasses.dataclass(frozen=True)
class SwapInProgram(Program):
    """Program that scatters SWAP_BLOCKS blocks (or SWAP_SLOTS state slots) into the donated KV cache."""

    moves_states: bool = False

    def __str__(self) -> str:
        return "swap in" + " states" * self.moves_states

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""
        part = _moved_arrays(context, moves_states=self.moves_states)

        def scatter(arrays: list[Array], blocks: list[Array], dst: Array) -> list[Array]:
            arrays = list(arrays)
            arrays[part] = [x.at[dst].set(b, mode="drop") for x, b in zip(arrays[part], blocks, strict=True)]
            return arrays

        num_moved = SWAP_SLOTS if self.moves_states else SWAP_BLOCKS
        moved = context.states(num_moved) if self.moves_states else context.pool(num_moved)
        kv_cache, ids = context.kv_cache(), context.shape((num_moved,), jnp.int32)
        jitted = jax.jit(scatter, donate_argnums=0, out_shardings=[context.pool_sharding] * len(kv_cache))
        return jitted.trace(kv_cache, moved, ids)


def _moved_arrays(context: TraceContext, *, moves_states: bool) -> slice:
    """Returns the slice of the KV cache arrays that a program reads or writes.

    Programs return the other arrays unchanged.
    """
    num_block_arrays = len(context.pool())
    return slice(num_block_arrays, None) if moves_states else slice(num_block_arrays)


def _copy_slots(states: Array, src: Array, dst: Array) -> Array:
    return states.at[dst].set(states.at[src].get(mode="clip"), mode="drop")


class BlockMover:
    """Copies blocks within the KV cache, and swaps them out to host memory and back, many blocks per call.

    Args:
        num_blocks: Number of blocks in the KV cache.
        max_copies: Maximum number of copies in one call.
        store: Copies blocks to host memory, see HostBlocks.store; None if nothing is swapped.
        load: Copies blocks back to the device, see HostBlocks.load; None if nothing is swapped.
        moves_states: Whether this mover moves recurrent state slots instead of blocks. The methods then apply
            to slots.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        max_copies: int,
        store: Callable[..., None] | None,
        load: Callable[[np.ndarray], list[Array]] | None,
        moves_states: bool = False,
    ) -> None:
        self._num_blocks, self._store, self._load = num_blocks, store, load
        self._moves_states, self._num_swapped = moves_states, SWAP_SLOTS if moves_states else SWAP_BLOCKS
        sizes = {1, max_copies} if moves_states else {FEW_COPIES, max_copies}
        self._copies = [CopyProgram(n, moves_states) for n in sorted(sizes)]

    @property
    def programs(self) -> list[Program]:
        """The programs that the other methods run."""
        if self._store is None:
            return [*self._copies]
        return [*self._copies, SwapOutProgram(self._moves_states), SwapInProgram(self._moves_states)]

    def move(self, run: Callable[..., Any], kv_cache: list[Array], step: SchedulerOutput) -> list[Array]:
        """Swaps and copies the blocks of a step. Donates `kv_cache` and returns the new KV cache.

        Blocks are swapped out first because the same step may reuse them. Then blocks are swapped in and
        copied.
        """
        swap_out, swap_in, copies = step.blocks_to_swap_out, step.blocks_to_swap_in, step.blocks_to_copy
        if self._moves_states:
            swap_out, swap_in, copies = map(tuple, step.state_moves)
        if swap_out:
            self.swap_out(run, kv_cache, swap_out)
        if swap_in:
            kv_cache = self.swap_in(run, kv_cache, swap_in)
        return self.copy(run, kv_cache, copies) if copies else kv_cache

    def copy(
        self, run: Callable[..., Any], kv_cache: list[Array], pairs: tuple[tuple[int, int], ...]
    ) -> list[Array]:
        """Copies blocks inside the KV cache.

        Args:
            run: Runs a program with the given arguments.
            kv_cache: The arrays of the KV cache. Donated.
            pairs: (source, destination) block ids. No block may be both a source and a destination.

        Returns:
            The arrays of the KV cache.
        """
        while pairs:
            program = next((p for p in self._copies if p.num_copies >= len(pairs)), self._copies[-1])
            size = program.num_copies
            src, dst = self._columns(pairs[:size], size, self._num_blocks, self._num_blocks)
            kv_cache = run(program, kv_cache, src, dst)
            pairs = pairs[size:]
        return kv_cache

    def swap_out(
        self, run: Callable[..., Any], kv_cache: list[Array], pairs: tuple[tuple[int, int], ...]
    ) -> None:
        """Copies (device block, host block) pairs to host memory and waits for the copies."""
        n, program = self._num_swapped, SwapOutProgram(self._moves_states)
        chunks = [pairs[i : i + n] for i in range(0, len(pairs), n)]
        gathered = [run(program, kv_cache, self._columns(c, n, 0, 0)[0]) for c in chunks]
        assert self._store is not None, "a step swaps out blocks, but the engine has no host blocks"
        for chunk, blocks in zip(chunks, gathered, strict=True):
            self._store(np.array([host for _, host in chunk], np.int32), blocks)

    def swap_in(
        self, run: Callable[..., Any], kv_cache: list[Array], pairs: tuple[tuple[int, int], ...]
    ) -> list[Array]:
        """Copies (host block, device block) pairs back to the device.

        Donates `kv_cache` and returns the new KV cache.
        """
        assert self._load is not None, "a step swaps in blocks, but the engine has no host blocks"
        n, program = self._num_swapped, SwapInProgram(self._moves_states)
        for i in range(0, len(pairs), n):
            src, dst = self._columns(pairs[i : i + n], n, 0, self._num_blocks)
            kv_cache = run(program, kv_cache, self._load(src), dst)
        return kv_cache

    def _columns(
        self, pairs: tuple[tuple[int, int], ...], size: int, pad_from: int, pad_to: int
    ) -> list[np.ndarray]:
        """Returns the two columns of the pairs as arrays, padded to `size` pairs."""
        columns = np.array([*pairs, *[(pad_from, pad_to)] * (size - len(pairs))], np.int32).T
        return [np.ascontiguousarray(c) for c in columns]


class HostBlocks:
    """Owner of the host memory for swapped blocks.

    If the devices belong to several processes, each process holds only the heads of its own devices.

    Args:
        shapes: Shapes and shardings of the KV cache arrays, with the number of host blocks in place of device
            blocks.

    Attributes:
        arrays: Host memory, one array per KV cache array. The operating system allocates it when it is first
            written.
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

    def store(self, host_block_ids: Int[np.ndarray, " n"], blocks: list[Array]) -> None:
        """Waits for blocks and copies them to host memory.

        Args:
            host_block_ids: The host blocks to write.
            blocks: The blocks of each KV cache array. Blocks after the first len(host_block_ids) are padding.
        """
        for memory, array in zip(self.arrays, blocks, strict=True):
            for shard in array.addressable_shards:
                heads = self._local(shard.index, array.shape)
                memory[host_block_ids, :, heads] = np.asarray(shard.data)[: len(host_block_ids)]

    def load(self, host_block_ids: Int[np.ndarray, " n"]) -> list[Array]:
        """Returns host blocks as arrays on the devices, one per KV cache array."""
        arrays = []
        for memory, whole in zip(self.arrays, self._shapes, strict=True):
            taken, shape = memory[host_block_ids], (len(host_block_ids), *whole.shape[1:])

            def part(index: Any, taken: np.ndarray = taken, shape: tuple[int, ...] = shape) -> np.ndarray:
                return taken[:, :, self._local(index, shape)]

            arrays.append(jax.make_array_from_callback(shape, whole.sharding, part))
        return arrays

    def _local(self, index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
        """Returns a device's heads as a slice of this process's memory, given its index into all heads."""
        first, end, _ = index[_HEADS].indices(shape[_HEADS])
        return slice(first - self._first, end - self._first)
