"""Time of a model's matrix products on this machine's CPU: XLA compared with oneDNN and packed matrices.

    python benchmarks/products.py [--widths 512 2048] [--dtypes float32 bfloat16] [--rows 1 64] [--rounds 7]

`layers` runs all products of a Llama's layers; the output of a layer is the input of the next layer. `head`
runs the product with the output matrix, whose result is float32. The matrices are arguments of one program,
as in a step of the engine. XLA and oneDNN alternate within each round. The table has the median times in
milliseconds, and the median of the rounds' ratios (time of oneDNN / time of XLA).
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged.pallas_kernels.native import products

VOCAB_SIZE = 8192
# Number of layers by width; their matrices have 120, 240 and 960 MiB in float32.
LAYERS = {512: 8, 2048: 1, 4096: 1}
KERNELS_PER_LAYER = 7

# multiply(x [rows, in], matrix, number of columns of the matrix, dtype of the result)
Multiply = Callable[[jax.Array, jax.Array, int, jnp.dtype], jax.Array]


def by_xla(x: jax.Array, kernel: jax.Array, columns: int, dtype: jnp.dtype) -> jax.Array:
    """Returns the product [rows, columns], computed by XLA."""
    return jnp.matmul(x, kernel, preferred_element_type=dtype)


def layer_shapes(width: int) -> list[tuple[int, int]]:
    """Returns the shapes of a layer's matrices: half as many KV heads as heads, an MLP of size 4 * width."""
    inner = 4 * width
    projections = [(width, width), (width, width // 2), (width, width // 2), (width, width)]
    return [*projections, (width, inner), (width, inner), (inner, width)]


def layers(x: jax.Array, kernels: list[jax.Array], columns: list[int], multiply: Multiply) -> jax.Array:
    """Returns the output of all layers for x [rows, width]; attention is replaced by a sum."""

    def product(x: jax.Array, i: int) -> jax.Array:
        return multiply(x, kernels[i], columns[i], x.dtype)

    for i in range(0, len(kernels), KERNELS_PER_LAYER):
        q, k, v = (product(x, i + j) for j in range(3))
        x = x + product(q + jnp.concatenate([k, v], axis=-1), i + 3)
        x = x + product(jax.nn.silu(product(x, i + 4)) * product(x, i + 5), i + 6)
    return x


def head(x: jax.Array, kernels: list[jax.Array], columns: list[int], multiply: Multiply) -> jax.Array:
    """Returns the logits, float32 [rows, vocabulary], for x [rows, width]."""
    return multiply(x, kernels[0], columns[0], jnp.dtype("float32"))


def report(
    model: Callable[..., jax.Array], width: int, dtype: jnp.dtype, rows: list[int], rounds: int
) -> None:
    """Measures `layers` or `head` and prints one line per number of rows."""
    rng = np.random.default_rng(0)
    shapes = [(width, VOCAB_SIZE)] if model is head else layer_shapes(width) * LAYERS[width]
    kernels = [jnp.asarray(rng.standard_normal(s, np.float32) * 0.3 * s[0] ** -0.5, dtype) for s in shapes]
    columns = [s[1] for s in shapes]
    arguments = {by_xla: kernels, products.multiply: [products.pack(kernel) for kernel in kernels]}
    for num_rows in rows:
        x = jnp.asarray(rng.standard_normal((num_rows, width), np.float32), dtype)
        calls = []
        for multiply, arrays in arguments.items():
            run = jax.jit(lambda x, arrays, multiply=multiply: model(x, arrays, columns, multiply))
            calls.append((run.lower(x, arrays).compile(), arrays))
        times = np.array(
            [[milliseconds(run, x, arrays) for run, arrays in calls] for _ in range(rounds + 1)]
        )[1:]
        xla, onednn = np.median(times, axis=0)
        ratio = np.median(times[:, 1] / times[:, 0])
        name = f"{dtype!s:<9}{width:>6}  {model.__name__:<7}{num_rows:>5}"
        print(f"{name}{xla:>10.2f}{onednn:>10.2f}{ratio:>8.2f}", flush=True)


def milliseconds(run: Callable[..., jax.Array], x: jax.Array, kernels: list[jax.Array]) -> float:
    """Returns the shorter time of two calls."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(run(x, kernels))
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def main() -> None:
    """Measures all combinations and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--widths", type=int, nargs="+", choices=LAYERS, default=list(LAYERS), help="hidden sizes"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 128, 512], help="numbers of token rows"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: %(default)s)")
    args = parser.parse_args()
    print(f"{'dtype':<9}{'width':>6}  {'':<7}{'rows':>5}{'XLA ms':>10}{'oneDNN ms':>10}{'ratio':>8}")
    for dtype in map(jnp.dtype, args.dtypes):
        reason = products.problem(dtype)
        if reason is not None:
            parser.exit(1, f"{dtype} cannot be measured: {reason}\n")
        for width in args.widths:
            for model in (layers, head):
                report(model, width, dtype, args.rows, args.rounds)


if __name__ == "__main__":
    main()
