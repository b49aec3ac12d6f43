"""Time of a layer's attention on this machine's CPU: the backend `native` compared with `xla`.

    python benchmarks/native_attention.py [--dtypes float32 bfloat16] [--rounds 7] [--only decode]

A layer writes the keys and values of the step into its pool and attends, like models/attention.py. LAYERS
layers run in one program. Each has its own pool, so that no layer finds its pages in the processor's caches.
The backends alternate within each round. The table has median times per layer in milliseconds, and the
median of the rounds' ratios (time of xla / time of native).
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.pallas_kernels import ops

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LAYERS = 8, 4, 64, 16, 4
MAX_MODEL_LEN = 2048
BACKENDS = ("native", "xla")


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch.

    Args:
        name: Name in the table.
        context_lens: Context length of each sequence after the step (tokens).
        query_lens: Number of tokens that each sequence computes in the step.
    """

    name: str
    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]


CASES = [
    *(
        Case(f"decode {batch} x {context}", (context,) * batch, (1,) * batch)
        for context in (200, 1000)
        for batch in (1, 8, 16, 64)
    ),
    Case("decode 1 x 2000", (2000,), (1,)),
    Case("mixed 512: 32 decodes at 400, prompts of 160", (400,) * 32 + (160,) * 3, (1,) * 32 + (160,) * 3),
    Case("mixed 512: 63 decodes at 200, a prompt at 449", (200,) * 63 + (449,), (1,) * 63 + (449,)),
    Case("prefill 512", (512,), (512,)),
    Case("prefill 512 of 1024", (1024,), (512,)),
    Case("prefill 512 of 1984", (1984,), (512,)),
]


def make_layers(
    case: Case, dtype: str, backend: str
) -> tuple[Callable[..., Any], list[jax.Array], list[Any]]:
    """Returns a jitted function of (pools, *arguments), its pools, and its arguments."""
    rng = np.random.default_rng(0)
    num_seqs, num_tokens = len(case.query_lens), sum(case.query_lens)
    columns = MAX_MODEL_LEN // PAGE_SIZE
    num_pages = 1 + sum(-(-n // PAGE_SIZE) for n in case.context_lens)
    pages = iter(1 + rng.permutation(num_pages - 1))
    tables, slots = np.zeros((num_seqs, columns), np.int32), []
    for b, (context, queries) in enumerate(zip(case.context_lens, case.query_lens, strict=True)):
        tables[b, : -(-context // PAGE_SIZE)] = [next(pages) for _ in range(-(-context // PAGE_SIZE))]
        token = np.arange(context - queries, context)
        slots.append(tables[b, token // PAGE_SIZE] * PAGE_SIZE + token % PAGE_SIZE)
    start = np.concatenate([[0], np.cumsum(case.query_lens)])
    # All pages have the same values. The values do not affect the time, but they must not be NaN.
    page = rng.normal(size=(2, KV_HEADS, PAGE_SIZE, HEAD_DIM))
    pools = [
        jnp.broadcast_to(jnp.asarray(page, dtype), (num_pages, *page.shape)).copy() for _ in range(LAYERS)
    ]
    q, k, v = (
        jnp.asarray(rng.normal(size=(num_tokens, n, HEAD_DIM)), dtype) for n in (HEADS, KV_HEADS, KV_HEADS)
    )
    integers = [np.concatenate(slots), tables, np.array(case.context_lens), start]
    arguments = [q, k, v, *(jnp.asarray(x, jnp.int32) for x in integers)]

    @functools.partial(jax.jit, donate_argnums=0)
    def layers(pools: list[jax.Array], *arguments: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        x, k, v, slots, tables, lens, start = arguments
        written = []
        for pool in pools:
            pool = ops.write_kv(pool, k, v, slots, backend=backend)
            if num_tokens == num_seqs:
                x = ops.paged_decode(x, pool, tables, lens, scale=0.125, backend=backend)
            else:
                x = ops.ragged_attention(x, pool, tables, lens, start, scale=0.125, backend=backend)
            written.append(pool)
        return written, x

    return layers, pools, arguments


def measure(case: Case, dtype: str, rounds: int) -> None:
    """Measures one case and prints a row of the table."""
    runs: dict[str, Any] = {backend: make_layers(case, dtype, backend) for backend in BACKENDS}
    times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    outs = {}
    for round_ in range(-1, rounds):
        for backend, (layers, pools, arguments) in runs.items():
            best = float("inf")
            for _ in range(3):
                begin = time.perf_counter()
                pools, out = layers(pools, *arguments)
                jax.block_until_ready(out)
                best = min(best, (time.perf_counter() - begin) / LAYERS * 1e3)
            runs[backend], outs[backend] = (layers, pools, arguments), np.asarray(out, np.float32)
            if round_ >= 0:
                times[backend].append(best)
    np.testing.assert_allclose(outs["native"], outs["xla"], rtol=0.02, atol=0.02)
    native, xla = (np.array(times[backend]) for backend in BACKENDS)
    ratio = np.median(xla / native)
    print(
        f"| {case.name} | {dtype} | {np.median(native):.3f} | {np.median(xla):.3f} | {ratio:.1f} |",
        flush=True,
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="run only the cases whose names contain this text")
    args = parser.parse_args()
    print("| step | dtype | native, ms per layer | xla | xla / native |\n|---|---|---|---|---|")
    for dtype in args.dtypes:
        for case in CASES:
            if args.only in case.name:
                measure(case, dtype, args.rounds)


if __name__ == "__main__":
    main()
