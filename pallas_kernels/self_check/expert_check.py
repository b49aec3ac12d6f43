"""The part of the check that concerns experts: batches for grouped_matmul, and timing."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

# Numbers of tokens that are checked: a decode step, and a step with a prefill chunk.
NUM_TOKENS = (32, 512)
# Duration of a measurement (seconds), and the largest number of calls in it.
_ROUND_S, _MAX_CALLS = 0.05, 40


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """Shape of a grouped_matmul in a model.

    Args:
        per_token: Number of experts per token.
        groups: Number of experts of a layer.
        inner_size: Columns of the rows, and rows of the kernels.
        num_columns: Columns of the kernels and of the result.
    """

    per_token: int
    groups: int
    inner_size: int
    num_columns: int

    def shapes(self, num_tokens: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes and dtypes of rows, kernels and group sizes."""
        kernels = (self.groups, self.inner_size, self.num_columns)
        shapes = (
            ((num_tokens * self.per_token, self.inner_size), dtype),
            (kernels, dtype),
            ((self.groups,), "int32"),
        )
        return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def batches(
    experts: tuple[ExpertShape, ...], dtype: str, *, is_timed: bool
) -> Iterator[tuple[str, tuple[Array, ...]]]:
    """Yields a name and arguments of grouped_matmul for each shape and number of tokens.

    They are created one at a time, because the kernels of a layer may take a gigabyte. The rows are
    distributed unevenly over the experts. If the batch is not timed, the kernels of experts without rows, and
    a few rows after the last group, are NaN.

    Args:
        experts: The shapes.
        dtype: Dtype of rows and kernels.
        is_timed: Whether the batch is timed. Then every row has an expert, and nothing is NaN.
    """
    rng, keys = np.random.default_rng(2), jax.random.split(jax.random.key(0))
    for one in experts:
        for num_tokens in NUM_TOKENS:
            # If the batch is not timed, the last three rows belong to no group.
            x, kernels, _ = one.shapes(num_tokens + (not is_timed), dtype)
            num_rows = x.shape[0] - (0 if is_timed else 3)
            sizes = rng.multinomial(max(0, num_rows), rng.dirichlet(np.full(one.groups, 0.5)))
            rows, values = (
                jax.random.normal(key, spec.shape, spec.dtype)
                for key, spec in zip(keys, (x, kernels), strict=True)
            )
            if not is_timed:
                rows = rows.at[int(sizes.sum()) :].set(jnp.nan)
                values = values.at[jnp.flatnonzero(sizes == 0)].set(jnp.nan)
            name = f"grouped_matmul, {len(rows)} rows, {one.groups} x {one.inner_size} x {one.num_columns}"
            yield name, (rows, values, jnp.asarray(sizes, jnp.int32))


class Timer:
    """Measures the time of some work on a device.

    Args:
        call: Starts the work, and returns arrays that are ready when it is done.
        num_per_call: How many times one call does the work.
    """

    def __init__(self, call: Callable[[], Any], num_per_call: int = 1) -> None:
        self._call, self._num_per_call = call, num_per_call
        self.calls = 1
        self.seconds()  # the first call compiles
        self.calls = max(1, min(_MAX_CALLS, int(_ROUND_S / (self.seconds() * num_per_call))))

    def seconds(self) -> float:
        """Returns the time of the work (seconds), averaged over several calls in a row."""
        start = time.perf_counter()
        out = [self._call() for _ in range(self.calls)]
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / (self.calls * self._num_per_call)


def timed_products(operations: Any, case: Any) -> Timer:
    """Returns a timer for a case of grouped_matmul with the operations of a backend."""
    run = jax.jit(operations.grouped_matmul)
    return Timer(lambda: run(*case.args))
