"""Logits processors: JAX functions of the user that change logits and are traced into the step.

A LogitsProcessor has a function fn(logits [V], state, extra_args), which returns new logits and a new state.
The processors are applied in order, before bias, penalties, token masks and temperature (see sampler.py).
Requests that do not name a processor keep bitwise equal logits.
"""

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jax_paged.errors import ArgumentError

# Values of a processor's first column: it is off, it continues with the state of the batch slot, or it begins
# with its initial state.
OFF, ON, BEGINS = 0.0, 1.0, 2.0


class ExtraArgs(NamedTuple):
    """Arguments of a processor for one logits row.

    Args:
        values: float32 [num_args], from SamplingParams.extra_args of the request.
        token_id: int32, the token before the one to be drawn.
        position: int32, position in the sequence of the token to be drawn.
    """

    values: Float[Array, " n"]
    token_id: Int[Array, ""]
    position: Int[Array, ""]


@dataclasses.dataclass(frozen=True, eq=False)
class LogitsProcessor:
    """A JAX function that changes the logits of the requests that name it, one logits row at a time.

    Args:
        name: Name in SamplingParams.extra_args.
        fn: fn(logits, state, extra_args) returns new logits and a new state. `logits` is float32 [V],
            `extra_args` is an ExtraArgs. The function is traced once per program, and called once per drawn
            token, in order.
        num_args: Number of arguments in SamplingParams.extra_args.
        state: Initial state of each sequence, a pytree of arrays. The states stay on the device, by batch
            slot.
    """

    name: str
    fn: Callable[[Array, Any, ExtraArgs], tuple[Array, Any]]
    num_args: int = 1
    state: Any = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ArgumentError("name", self.name, "a non-empty string")
        if not isinstance(self.num_args, numbers.Integral) or self.num_args < 0:
            raise ArgumentError("num_args", self.num_args, "an integer of at least 0")
        object.__setattr__(self, "num_args", int(self.num_args))

    @property
    def has_state(self) -> bool:
        """Whether the processor keeps a state."""
        return bool(jax.tree.leaves(self.state))


def num_columns(processors: Sequence[LogitsProcessor]) -> int:
    """Returns the number of columns of processor_args: for each processor, its mode and its arguments."""
    return sum(1 + processor.num_args for processor in processors)


def state_shapes(processors: Sequence[LogitsProcessor], num_batch_slots: int) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of all leaves of the states, each [S, ...]."""
    leaves = [_array(leaf) for p in processors for leaf in jax.tree.leaves(p.state)]
    return [jax.ShapeDtypeStruct((num_batch_slots, *leaf.shape), leaf.dtype) for leaf in leaves]


def check_processors(processors: Sequence[LogitsProcessor], vocab_size: int) -> None:
    """Checks processors by tracing them, without running them.

    Raises:
        ValueError: If a result has another structure, shape or dtype than required, or if names are not
            unique.
    """
    names = [processor.name for processor in processors]
    if len(set(names)) < len(names):
        raise ArgumentError("logits_processors", names, "unique", aspect="the names of")
    logits, number = jax.ShapeDtypeStruct((vocab_size,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    for p in processors:
        state = jax.tree.map(_array, p.state)
        args: Any = (jax.ShapeDtypeStruct((p.num_args,), jnp.float32), number, number)
        result = jax.eval_shape(p.fn, logits, state, ExtraArgs(*args))
        ok = isinstance(result, tuple) and len(result) == 2 and _has_equal_shapes(result, (logits, state))
        if not ok:
            allowed = f"float32 logits of shape ({vocab_size},) and a state with the structure of its input"
            raise ArgumentError(p.name, result, allowed, aspect="the result of logits processor")


def _array(leaf: Any) -> Array:
    """Returns a leaf of a state as an array. 64-bit values are converted to 32 bits."""
    array = jnp.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)
    # Extended dtypes, for example of random keys, need no conversion.
    return array.astype(dtype) if isinstance(dtype, np.dtype) else array


def _has_equal_shapes(a: Any, b: Any) -> bool:
    """Returns whether two pytrees have the same structure, shapes and dtypes."""
    is_same = jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=False)
    return is_same and all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)


def process(
    processors: Sequence[LogitsProcessor],
    logits: Float[Array, "b v"],
    states: list[Array],
    columns: Float[Array, "b columns"],
    batch_slots: Int[Array, " b"],
    token_ids: Int[Array, " b"],
    positions: Int[Array, " b"],
) -> tuple[Float[Array, "b v"], list[Array]]:
    """Applies processors to the logits rows of the requests that use them.

    Args:
        processors: The processors, in order.
        logits: float32.
        states: All leaves of the states, each [S, ...].
        columns: OFF, ON or BEGINS, and the arguments, of each processor, by logits row.
        batch_slots: int32, batch slot of each logits row; out of range for rows without one.
        token_ids: int32, the last token before each logits row.
        positions: int32, positions of the tokens to be drawn.

    Returns:
        The new logits and states.
    """
    states, first_column, first_leaf = list(states), 0, 0
    for p in processors:
        mode = columns[:, first_column]
        values = columns[:, first_column + 1 : first_column + 1 + p.num_args]
        initial, structure = jax.tree.flatten(jax.tree.map(_array, p.state))
        own = states[first_leaf : first_leaf + len(initial)]

        def apply(
            x: Array,
            own: list[Array],
            p: LogitsProcessor = p,
            mode: Array = mode,
            values: Array = values,
            initial: list[Array] = initial,
            structure: Any = structure,
        ) -> tuple[Array, list[Array]]:
            saved = [leaf.at[batch_slots].get(mode="clip") for leaf in own]
            pairs = zip(saved, initial, strict=True)
            current = [jnp.where(_broadcastable(mode == BEGINS, i), i, s) for s, i in pairs]
            args = ExtraArgs(values, token_ids, positions)
            new, state = jax.vmap(p.fn)(x, jax.tree.unflatten(structure, current), args)
            target = jnp.where(mode == OFF, len(own[0]) if own else 0, batch_slots)
            pairs = zip(own, jax.tree.leaves(state), strict=True)
            return jnp.where(_broadcastable(mode != OFF, x[0]), new, x), [
                leaf.at[target].set(rows, mode="drop") for leaf, rows in pairs
            ]

        logits, own = lax.cond(jnp.any(mode != OFF), apply, lambda x, own: (x, own), logits, own)
        states[first_leaf : first_leaf + len(initial)] = own
        first_column, first_leaf = first_column + 1 + p.num_args, first_leaf + len(initial)
    return logits, states


def _broadcastable(is_on: Array, row: Array) -> Array:
    """Returns a mask of rows in a shape that broadcasts over the dimensions of `row`."""
    return is_on.reshape(-1, *[1] * row.ndim)
