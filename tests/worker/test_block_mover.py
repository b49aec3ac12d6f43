"""Swapping and copying move whole blocks, bit by bit, and leave all others alone; the pool stays in place."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import Mesh

from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.models.attention import StateArray
from jax_paged.models.kv_location import KVLocation
from jax_paged.models.parallel.sharding import TENSOR
from jax_paged.worker.block_mover import (
    FEW_COPIES,
    SWAP_BLOCKS,
    BlockMover,
    CopyProgram,
    HostBlocks,
    SwapInProgram,
    SwapOutProgram,
)
from jax_paged.worker.compilation.feature_set import FeatureSet
from jax_paged.worker.compilation.programs import Program, TraceContext
from jax_paged.worker.kv_cache import KVCacheLayout, kv_cache_sharding
from jax_paged.worker.loading.weights import FlatModel
from jax_paged.worker.sampling.sampler import SamplerOptions

LAYOUT = KVCacheLayout(
    (CacheGroup(),),
    (KVLocation(0, 0), KVLocation(1, 0), KVLocation(2, 0)),
    num_block_arrays=3,
    num_kv_heads=2,
    head_dim=8,
    dtype=jnp.dtype("float32"),
)
NUM_BLOCKS, BLOCK_SIZE, MAX_COPIES, NUM_SLOTS = 200, 4, 20, 9
STATES = StateArray((3, 8), "float32"), StateArray((1, 4, 2, 6), "bfloat16")
MESH = Mesh(np.array(jax.devices()[:1]), (TENSOR,))
Pairs = tuple[tuple[int, int], ...]


@functools.cache
def make_mover(
    dtype: str = "float32",
    num_swap_blocks: int = 150,
    num_blocks: int = NUM_BLOCKS,
    moves_states: bool = False,
) -> tuple[BlockMover, dict[Program, jax.stages.Compiled]]:
    states = STATES if moves_states else ()
    layout = dataclasses.replace(LAYOUT, dtype=jnp.dtype(dtype), states=states)
    context = TraceContext(
        model=FlatModel(None, None),  # none of these programs runs it
        weights=[],
        layout=layout,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=jnp.dtype(dtype),
        vocab_size=32,
        max_model_len=16,
        max_num_seqs=MAX_COPIES,
        max_num_batched_tokens=16,
        features=FeatureSet(),
        sampling=SamplerOptions(max_logprobs=1),
        backend="xla",
        batch_invariant=False,
        mesh=MESH,
        num_state_slots=NUM_SLOTS,
    )
    host = HostBlocks((context.states if moves_states else context.pool)(num_swap_blocks + 1))
    swaps = {"store": host.store, "load": host.load} if num_swap_blocks else {"store": None, "load": None}
    num_moved = NUM_SLOTS if moves_states else num_blocks
    mover = BlockMover(num_blocks=num_moved, max_copies=MAX_COPIES, **swaps, moves_states=moves_states)
    return mover, {program: program.lower(context).compile() for program in mover.programs}


def runner(programs: dict[Program, Any], used: list[Program]) -> Callable[..., Any]:
    def run(program: Program, *args: Any) -> Any:
        used.append(program)
        return programs[program](*args)

    return run


def random_pool(seed: int, dtype: str = "float32") -> list[np.ndarray]:
    """Any bits, NaN among them."""
    shape = dataclasses.replace(LAYOUT, dtype=jnp.dtype(dtype)).pool_shape(NUM_BLOCKS, BLOCK_SIZE)
    rng = np.random.default_rng(seed)
    size = jnp.dtype(dtype).itemsize
    arrays = [rng.integers(0, 256, (*shape, size), np.uint8) for _ in range(LAYOUT.num_block_arrays)]
    return [x.view(jnp.dtype(dtype))[..., 0] for x in arrays]


def place(pool: list[np.ndarray]) -> list[Array]:
    return [jax.device_put(x.copy(), kv_cache_sharding(MESH)) for x in pool]


def assert_same_bits(pool: list[Array], expected: list[np.ndarray]) -> None:
    for got, want in zip(pool, expected, strict=True):
        assert np.asarray(got).tobytes() == want.tobytes()


def random_pairs(seed: int, count: int, num_from: int, num_to: int) -> Pairs:
    rng = np.random.default_rng(seed)
    columns = (rng.permutation(np.arange(1, n))[:count].tolist() for n in (num_from, num_to))
    return tuple(zip(*columns, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("count", [1, SWAP_BLOCKS - 1, SWAP_BLOCKS, SWAP_BLOCKS + 1, 3 * SWAP_BLOCKS + 5])
def test_swap_out_overwrite_swap_in(dtype: str, count: int) -> None:
    mover, programs = make_mover(dtype)
    used: list[Program] = []
    run = runner(programs, used)
    before, after = random_pool(1, dtype), random_pool(2, dtype)
    out = random_pairs(3, count, NUM_BLOCKS, 151)
    pool = place(before)
    mover.swap_out(run, pool, out)
    assert_same_bits(pool, before)
    # Everything on the device is overwritten, then the blocks come back elsewhere, in another order.
    back = tuple(
        (host, to) for (_, host), (_, to) in zip(out, random_pairs(4, count, 151, NUM_BLOCKS), strict=True)
    )
    order = np.random.default_rng(5).permutation(count)
    pool = mover.swap_in(run, place(after), tuple(back[i] for i in order))
    for x, source in zip(after, before, strict=True):
        x[[to for _, to in back]] = source[[block for block, _ in out]]
    assert_same_bits(pool, after)
    num_calls = -(-count // SWAP_BLOCKS)
    assert used == [SwapOutProgram()] * num_calls + [SwapInProgram()] * num_calls


def test_two_swapped_groups_do_not_mix() -> None:
    mover, programs = make_mover()
    run = runner(programs, [])
    first, second, pool = random_pool(1), random_pool(2), place(random_pool(3))
    mover.swap_out(run, place(first), ((5, 1), (6, 2), (7, 3)))
    mover.swap_out(run, place(second), ((5, 4), (9, 2)))
    pool = mover.swap_in(run, pool, ((1, 11), (2, 12), (3, 13), (4, 14)))
    expected = random_pool(3)
    for x, a, b in zip(expected, first, second, strict=True):
        x[11], x[12], x[13], x[14] = a[5], b[9], a[7], b[5]
    assert_same_bits(pool, expected)


@pytest.mark.parametrize("count", [1, FEW_COPIES, FEW_COPIES + 1, MAX_COPIES, MAX_COPIES + 1, 3 * MAX_COPIES])
def test_copies(count: int) -> None:
    mover, programs = make_mover()
    used: list[Program] = []
    expected = random_pool(1)
    blocks = np.random.default_rng(count).permutation(np.arange(1, NUM_BLOCKS))[: 2 * count]
    # A block may be copied to several others, but is not both read and written.
    sources, targets = np.resize(blocks[: max(1, count // 2)], count).tolist(), blocks[count:].tolist()
    pool = mover.copy(runner(programs, used), place(expected), tuple(zip(sources, targets, strict=True)))
    for x in expected:
        x[targets] = x[sources]
    assert_same_bits(pool, expected)
    sizes = [min(MAX_COPIES, count - i) for i in range(0, count, MAX_COPIES)]
    assert used == [CopyProgram(FEW_COPIES if size <= FEW_COPIES else MAX_COPIES) for size in sizes]


def test_slots_of_states_move_and_blocks_stay() -> None:
    mover, programs = make_mover(num_swap_blocks=5, moves_states=True)
    run, rng = runner(programs, []), np.random.default_rng(0)
    states = [rng.random((NUM_SLOTS, *shape)).astype(kind) for shape, kind in STATES]
    blocks = random_pool(1)
    pool = mover.copy(run, place([*blocks, *states]), ((1, 2), (1, 8), (3, 4)))
    mover.swap_out(run, pool, ((2, 5), (3, 1), (6, 4)))
    pool = mover.swap_in(run, pool, ((5, 7), (4, 1)))
    for x in states:
        x[[2, 8, 4]] = x[[1, 1, 3]]
        x[[7, 1]] = x[[2, 6]]
    assert_same_bits(pool, [*blocks, *states])


def test_nothing_to_move() -> None:
    mover, programs = make_mover()
    used: list[Program] = []
    pool = place(random_pool(1))
    assert mover.copy(runner(programs, used), pool, ()) is pool
    assert mover.swap_in(runner(programs, used), pool, ()) is pool
    mover.swap_out(runner(programs, used), pool, ())
    assert used == []


def test_programs() -> None:
    copies = [CopyProgram(FEW_COPIES), CopyProgram(MAX_COPIES)]
    assert make_mover()[0].programs == [*copies, SwapOutProgram(), SwapInProgram()]
    assert make_mover(num_swap_blocks=0)[0].programs == copies
    names = [f"copy {FEW_COPIES}", f"copy {MAX_COPIES}", "swap out", "swap in"]
    assert [str(program) for program in make_mover()[0].programs] == names


def test_pool_is_updated_in_place() -> None:
    """Temporaries are those of the moved blocks, however large the pool is; the pool itself is aliased."""
    block_bytes = LAYOUT.block_bytes(BLOCK_SIZE)
    for name, program in make_mover()[1].items():
        memory = program.memory_analysis()
        larger = make_mover(num_blocks=10 * NUM_BLOCKS)[1][name].memory_analysis()
        assert memory is not None
        assert larger is not None
        assert larger.temp_size_in_bytes == memory.temp_size_in_bytes, name
        assert memory.temp_size_in_bytes <= 2 * max(SWAP_BLOCKS, MAX_COPIES) * block_bytes, name
        if name == SwapOutProgram():
            assert memory.output_size_in_bytes < 1.1 * SWAP_BLOCKS * block_bytes
        else:
            assert memory.alias_size_in_bytes == NUM_BLOCKS * block_bytes, name
            assert memory.output_size_in_bytes <= 1.01 * NUM_BLOCKS * block_bytes, name
