"""The part of self_check.py that is about experts: batches of grouped_matmul, and their time."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

# What is run: the rows of a decode step, and of a step with a chunk of a prompt.
NUM_TOKENS = (32, 512)
_ROUND_S, _MAX_CALLS = 0.05, 40


@dataclasses.dataclass(frozen=True)
class Experts:
    """A grouped_matmul of a model.

    Args:
        per_token: Experts that a token goes through.
        groups: Experts of a layer.
        size: Columns of the rows.
        width: Columns of the result.
    """

    per_token: int
    groups: int
    size: int
    width: int

    def shapes(self, num_tokens: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns those of rows, kernels and sizes."""
        kernels = (self.groups, self.size, self.width)
        shapes = (
            ((num_tokens * self.per_token, self.size), dtype),
            (kernels, dtype),
            ((self.groups,), "int32"),
        )
        return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def batches(
    experts: tuple[Experts, ...], dtype: str, *, is_timed: bool
) -> Iterator[tuple[str, tuple[Array, ...]]]:
    """Yields names and arguments of grouped_matmul, one at a time, as a layer's kernels may take a gigabyte.

    Some experts get many rows and some get none, whose kernels are NaN if it is not timed; so are a few rows
    behind the last group then.

    Args:
        experts: The shapes.
        dtype: Of rows and kernels.
        is_timed: Whether every row has an expert, and every kernel is a number.
    """
    rng, keys = np.random.default_rng(2), jax.random.split(jax.random.key(0))
    for one in experts:
        for num_tokens in NUM_TOKENS:
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
            name = f"grouped_matmul, {len(rows)} rows, {one.groups} x {one.size} x {one.width}"
            yield name, (rows, values, jnp.asarray(sizes, jnp.int32))


class Timed:
    """Work of a device, called several times.

    Args:
        call: Starts the work, and returns arrays that are ready when it is done.
        num_per_call: How often a call does the work.
    """

    def __init__(self, call: Callable[[], Any], num_per_call: int = 1) -> None:
        self._call, self._num_per_call = call, num_per_call
        self.calls = 1
        self.seconds()  # compiles
        self.calls = max(1, min(_MAX_CALLS, int(_ROUND_S / (self.seconds() * num_per_call))))

    def seconds(self) -> float:
        """Returns the seconds that the work takes, of some calls that the device does one after the other."""
        start = time.perf_counter()
        out = [self._call() for _ in range(self.calls)]
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / (self.calls * self._num_per_call)


def timed_products(kernels: Any, case: Any) -> Timed:
    """Returns the grouped_matmul of a case, to be timed with these kernels."""
    run = jax.jit(kernels.grouped_matmul)
    return Timed(lambda: run(*case.args))
