"""The products of experts on every backend against float64, and the parts of the kernel for sm_90."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.gpus import A100, B200, H100, lowered
from helpers.oracle import TOLERANCE, relative_error

from jax_paged.pallas_kernels.gpu import grouped_wgmma, tuning
from jax_paged.pallas_kernels.gpu.grouped_wgmma import ALIGNMENT, Tiles, choose_tiles, work_list
from jax_paged.pallas_kernels.grouped_matmul import grouped_matmul, implementation_of

pytestmark = pytest.mark.thorough

BACKENDS = ["xla", "reference", "pallas_interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
LARGE = tuning.Target((9, 0), 132, 227 * 1024)


def make_case(sizes, num_rows, size, width, dtype, seed=0):
    """Rows behind the last group, and kernels of empty groups, hold NaN."""
    rng = np.random.default_rng(seed)
    sizes = np.array(sizes, np.int32)
    x = rng.standard_normal((num_rows, size)).astype(dtype)
    kernels = rng.standard_normal((len(sizes), size, width)).astype(dtype)
    x[sizes.sum() :], kernels[sizes == 0] = np.nan, np.nan
    return tuple(map(jnp.asarray, (x, kernels, sizes)))


def oracle(x, kernels, sizes):
    x, kernels = (np.asarray(a).astype(np.float64) for a in (x, kernels))
    out, begin = np.zeros((len(x), kernels.shape[2])), 0
    for kernel, size in zip(kernels, np.asarray(sizes), strict=True):
        out[begin : begin + size] = x[begin : begin + size] @ kernel
        begin += size
    return out


def check(case, run):
    got, want = np.asarray(run(*case)).astype(np.float64), oracle(*case)
    assert relative_error(got, want) < TOLERANCE[case[0].dtype.name]
    assert (got[int(case[2].sum()) :] == 0).all()


# Groups that begin at any row, that are empty, that fill tiles; rows that no group has.
SHAPES = [
    ([1], 1, 64, 64, "bfloat16"),
    ([3, 0, 40, 0, 5], 48, 128, 192, "bfloat16"),
    ([0, 3, 40, 0, 5, 0], 61, 512, 128, "float16"),
    ([0, 130, 7, 1, 200, 0, 3], 345, 64, 128, "bfloat16"),
    ([0, 0], 9, 64, 64, "bfloat16"),
    ([64, 64, 128], 256, 192, 64, "float16"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("sizes", "num_rows", "size", "width", "dtype"), SHAPES, ids=str)
def test_matches_float64(backend, sizes, num_rows, size, width, dtype):
    case = make_case(sizes, num_rows, size, width, dtype)
    check(case, jax.jit(functools.partial(grouped_matmul, backend=backend)))


@pytest.mark.parametrize(
    "interpret", [True, pytest.param(False, marks=pytest.mark.gpu)], ids=["interpreter", "gpu"]
)
@pytest.mark.parametrize(
    "tiles", [Tiles(64, 64, 64, 2), Tiles(64, 128, 64, 3), Tiles(128, 64, 64, 4), Tiles(128, 128, 64, 2)]
)
def test_tiles(tiles, interpret):
    """A ring of stages that comes around, in tiles of both sizes."""
    if not interpret and not tuning.target().has_wgmma:
        pytest.skip("the kernel is of wgmma")
    case = make_case([10, 0, 137, 1], 150, 448, 128, "bfloat16", seed=1)
    check(case, functools.partial(grouped_wgmma.grouped_matmul, tiles=tiles, interpret=interpret))


@pytest.mark.quick
@pytest.mark.gpu
def test_random_groups():
    rng = np.random.default_rng(7)
    for seed in range(8):
        sizes = rng.zipf(1.4, rng.integers(1, 12)).clip(0, 150) * (rng.random() < 0.8)
        num_rows = int(sizes.sum() + rng.integers(1, 20))
        size, width = 64 * rng.integers(1, 6, 2)
        case = make_case(sizes, num_rows, size, width, "bfloat16", seed)
        check(case, functools.partial(grouped_matmul, backend="pallas"))


@pytest.mark.quick
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("num_groups", [1, 8, 128])
def test_tiles_cover_every_row_once(num_groups, rows):
    rng = np.random.default_rng(num_groups)
    plan = jax.jit(work_list, static_argnums=(1, 2))
    for num_rows in (1, 8, 64, 777):
        for _ in range(10):
            shares = rng.dirichlet(np.full(num_groups, 0.2))
            sizes = rng.multinomial(num_rows - rng.integers(0, 2), shares)
            items = np.asarray(plan(jnp.asarray(sizes, jnp.int32), num_rows, rows))
            owner = np.full(num_rows, -1)
            for group, first, begin, end in items:
                assert 0 <= group < num_groups
                assert first % ALIGNMENT == 0
                assert first <= begin
                assert end <= first + rows
                assert (owner[begin:end] == -1).all()
                owner[begin:end] = group
            want = np.repeat(np.arange(num_groups), sizes)
            np.testing.assert_array_equal(owner[: len(want)], want)
            assert (owner[len(want) :] == -1).all()


@pytest.mark.quick
def test_the_list_is_never_too_short():
    """The worst case: every group begins just before a multiple of 8, and has one row more than a tile."""
    sizes = [7] + [64 + 2] * 30
    items = np.asarray(work_list(jnp.asarray(sizes, jnp.int32), sum(sizes), 64))
    assert sum(end - begin for _, _, begin, end in items) == sum(sizes)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("num_rows", "num_groups", "size", "width", "rows", "columns"),
    [
        (64, 8, 4096, 14336, 64, 128),  # 32 tokens of Mixtral 8x7B, up and down
        (64, 8, 14336, 4096, 64, 128),
        (
            2,
            8,
            14336,
            4096,
            64,
            64,
        ),  # one token: 2 x 32 tiles of 128 columns would leave half of the GPU idle
        (4096, 8, 4096, 14336, 128, 128),  # a chunk of 2,048 tokens
        (256, 128, 2048, 768, 64, 128),  # 32 tokens of Qwen3 30B-A3B
        (8, 128, 2048, 768, 64, 64),
        (16384, 128, 2048, 768, 128, 128),
        (4096, 8, 512, 192, 128, 64),  # no multiple of 128
    ],
)
def test_rule_of_tiles(num_rows, num_groups, size, width, rows, columns):
    tiles = choose_tiles(LARGE, num_rows, num_groups, size, width)
    assert (tiles.rows, tiles.columns) == (rows, columns)
    assert width % tiles.columns == 0
    assert size % tiles.inner == 0
    assert 2 <= tiles.num_stages <= 6
    assert 2 * (tiles.smem_bytes + 1024) <= LARGE.smem_bytes


def test_only_gpus_with_wgmma_have_the_kernel():
    case = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((64, 128), "bfloat16"), ((8, 128, 256), "bfloat16"), ((8,), "int32"))
    ]
    for gpu, expected in ((A100, 0), (H100, 1), (B200, 0)):
        text = lowered(gpu, functools.partial(grouped_matmul, backend="pallas"), *case)
        assert text.count("mosaic_gpu") > 0 if expected else "mosaic_gpu" not in text
    assert implementation_of("pallas_interpret") == "wgmma"
    assert implementation_of("reference") == "reference"
    for backend in ("auto", "native", "xla"):
        assert implementation_of(backend) == "loop"


@pytest.mark.quick
def test_bad_input():
    x, kernels, sizes = make_case([3, 1], 4, 64, 128, "bfloat16")
    run = functools.partial(grouped_matmul, backend="pallas_interpret")
    with pytest.raises(
        ValueError, match=r"the shape of `x` must be \[rows, columns\] with at least one row, got \(64,\)"
    ):
        run(x[0], kernels, sizes)
    with pytest.raises(
        ValueError, match=r"the shape of `kernels` must be \[groups, 64, columns\] with `x`, got"
    ):
        run(x, kernels[:, :32], sizes)
    with pytest.raises(
        ValueError, match=r"the dtype of `kernels` must be that of `x`, bfloat16, got float32"
    ):
        run(x, kernels.astype(jnp.float32), sizes)
    with pytest.raises(
        ValueError, match=r"the shape of `group_sizes` must be \(2,\) with `kernels`, got \(1,\)"
    ):
        run(x, kernels, sizes[:1])
    with pytest.raises(ValueError, match=r"the dtype of `group_sizes` must be int32.*got float32"):
        run(x, kernels, sizes.astype(jnp.float32))
    with pytest.raises(
        ValueError, match=r"the number of rows of `kernels` must be a multiple of 64 .*got 32\. Backend 'xla'"
    ):
        run(x[:, :32], kernels[:, :32], sizes)
    with pytest.raises(
        ValueError, match=r"the number of columns of `kernels` must be a multiple of 64 .*got 96"
    ):
        run(x, kernels[:, :, :96], sizes)
    with pytest.raises(ValueError, match="got 'pallas', which needs an NVIDIA GPU"):
        grouped_matmul(x, kernels, sizes, backend="pallas")
    wide = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (x, kernels)]
    wide.append(jax.ShapeDtypeStruct(sizes.shape, sizes.dtype))
    with pytest.raises(
        ValueError, match=r"the dtype of `x` must be one of bfloat16, float16 .*got float32\. Backend 'xla'"
    ):
        lowered(H100, functools.partial(grouped_matmul, backend="pallas"), *wide)
    with pytest.raises(ValueError, match=r"the shared memory of grouped_matmul with Tiles.* must be at most"):
        grouped_wgmma.grouped_matmul(x, kernels, sizes, tiles=Tiles(128, 128, 64, 9), interpret=True)
