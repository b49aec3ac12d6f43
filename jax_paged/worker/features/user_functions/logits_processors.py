"""Functions of a user that change logits, traced into the step.

LogitsProcessor("name", fn, num_args, state)

fn(logits [V], state, extra_args) -> (logits [V], state)
logits -> processors, in order -> bias, penalties, mask, temperature, ... (sampler.py)
rows of requests that did not ask for a processor keep their logits, to the bit
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

# In the column of a processor: it is off for a row, goes on from the batch slot's state, or begins.
OFF, ON, BEGINS = 0.0, 1.0, 2.0


class ExtraArgs(NamedTuple):
    """What a processor is told of the row whose logits it gets.

    Args:
        values: float32 [num_args], what the request says in SamplingParams.extra_args.
        token_id: int32, the token before the one to choose.
        position: int32, where in its sequence the token to choose will stand.
    """

    values: Float[Array, " n"]
    token_id: Int[Array, ""]
    position: Int[Array, ""]


@dataclasses.dataclass(frozen=True, eq=False)
class LogitsProcessor:
    """Changes the logits of the requests that ask for it by name, one row at a time.

    Args:
        name: What requests call it.
        fn: fn(logits, state, extra_args) returns new logits and the new state. logits is float32 [V],
            extra_args an ExtraArgs. It is traced once per program, and called once per token that is drawn,
            in order.
        num_args: How many numbers a request hands to `fn`.
        state: What each sequence begins with: a pytree of arrays. It stays on the device, once per batch
            slot.
    """

    name: str
    fn: Callable[[Array, Any, ExtraArgs], tuple[Array, Any]]
    num_args: int = 1
    state: Any = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name is {self.name!r}; allowed: text that is not empty")
        if not isinstance(self.num_args, numbers.Integral) or self.num_args < 0:
            raise ValueError(f"num_args is {self.num_args!r}; allowed: an integer of at least 0")
        object.__setattr__(self, "num_args", int(self.num_args))

    @property
    def has_state(self) -> bool:
        """Whether anything is kept from token to token."""
        return bool(jax.tree.leaves(self.state))


def num_columns(processors: Sequence[LogitsProcessor]) -> int:
    """Returns how many numbers say which processors are on for a row, and with which arguments."""
    return sum(1 + processor.num_args for processor in processors)


def state_shapes(processors: Sequence[LogitsProcessor], num_batch_slots: int) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of all leaves of the states, [S, ...]."""
    leaves = [_array(leaf) for p in processors for leaf in jax.tree.leaves(p.state)]
    return [jax.ShapeDtypeStruct((num_batch_slots, *leaf.shape), leaf.dtype) for leaf in leaves]


def check_processors(processors: Sequence[LogitsProcessor], vocab_size: int) -> None:
    """Traces processors without computing anything.

    Raises:
        ValueError: If one returns something else than it should, or two have one name.
    """
    names = [processor.name for processor in processors]
    if len(set(names)) < len(names):
        raise ValueError(f"logits_processors are named {names}; allowed: a name for each")
    logits, number = jax.ShapeDtypeStruct((vocab_size,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    for p in processors:
        state = jax.tree.map(_array, p.state)
        args: Any = (jax.ShapeDtypeStruct((p.num_args,), jnp.float32), number, number)
        result = jax.eval_shape(p.fn, logits, state, ExtraArgs(*args))
        ok = isinstance(result, tuple) and len(result) == 2 and _like(result, (logits, state))
        if not ok:
            raise ValueError(
                f"logits processor {p.name!r} returns {result}; allowed: logits of shape ({vocab_size},) in "
                "float32, and a state like the one it got"
            )


def _array(leaf: Any) -> Array:
    """Returns a leaf of a state as an array; of 32 bits, if the user's program made it of 64 bits."""
    array = jnp.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)
    # Extended types, such as that of random keys, have one form only.
    return array.astype(dtype) if isinstance(dtype, np.dtype) else array


def _like(ours: Any, theirs: Any) -> bool:
    same = jax.tree.structure(ours) == jax.tree.structure(theirs)
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=False)
    return same and all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


def process(
    processors: Sequence[LogitsProcessor],
    logits: Float[Array, "b v"],
    states: list[Array],
    columns: Float[Array, "b columns"],
    batch_slots: Int[Array, " b"],
    token_ids: Int[Array, " b"],
    positions: Int[Array, " b"],
) -> tuple[Float[Array, "b v"], list[Array]]:
    """Applies processors to the rows that they are on for.

    Args:
        processors: In this order.
        logits: float32.
        states: All leaves, [S, ...].
        columns: For each row and each processor, OFF, ON or BEGINS, and its arguments.
        batch_slots: int32, of each row; one that is out of range has none.
        token_ids: int32, the last token of each row.
        positions: int32, those of the tokens to choose.

    Returns:
        The new logits and states.
    """
    states, first_column, first_leaf = list(states), 0, 0
    for p in processors:
        mode = columns[:, first_column]
        values = columns[:, first_column + 1 : first_column + 1 + p.num_args]
        begin, structure = jax.tree.flatten(jax.tree.map(_array, p.state))
        own = states[first_leaf : first_leaf + len(begin)]

        def apply(
            x: Array,
            own: list[Array],
            p: LogitsProcessor = p,
            mode: Array = mode,
            values: Array = values,
            begin: list[Array] = begin,
            structure: Any = structure,
        ) -> tuple[Array, list[Array]]:
            kept = [leaf.at[batch_slots].get(mode="clip") for leaf in own]
            now = [jnp.where(_wide(mode == BEGINS, b), b, k) for k, b in zip(kept, begin, strict=True)]
            args = ExtraArgs(values, token_ids, positions)
            new, state = jax.vmap(p.fn)(x, jax.tree.unflatten(structure, now), args)
            target = jnp.where(mode == OFF, len(own[0]) if own else 0, batch_slots)
            pairs = zip(own, jax.tree.leaves(state), strict=True)
            return jnp.where(_wide(mode != OFF, x[0]), new, x), [
                leaf.at[target].set(rows, mode="drop") for leaf, rows in pairs
            ]

        logits, own = lax.cond(jnp.any(mode != OFF), apply, lambda x, own: (x, own), logits, own)
        states[first_leaf : first_leaf + len(begin)] = own
        first_column, first_leaf = first_column + 1 + p.num_args, first_leaf + len(begin)
    return logits, states


def _wide(is_on: Array, row: Array) -> Array:
    return is_on.reshape(-1, *[1] * row.ndim)
