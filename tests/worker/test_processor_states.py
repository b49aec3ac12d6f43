"""States of logits processors in host memory while the engine sleeps."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_paged.worker.features.user_functions.processor_states import SavedStates


def test_the_copy_in_host_memory_is_freed_by_restore() -> None:
    copies: list[weakref.ref[np.ndarray]] = []

    def to_devices(*arrays: np.ndarray) -> tuple[Array, ...]:
        copies.extend(map(weakref.ref, arrays))
        return jax.block_until_ready(tuple(jnp.array(x, copy=True) for x in arrays))

    saved, states = SavedStates(), [jnp.arange(6.0).reshape(3, 2), jnp.ones(3, jnp.int32)]
    assert saved.restore(states, to_devices) is states
    saved.free(states)
    for got, want in zip(saved.restore([], to_devices), states, strict=True):
        assert (got == want).all()
        assert got.dtype == want.dtype
    assert len(copies) == 2
    assert all(copy() is None for copy in copies)
    assert saved.restore(states, to_devices) is states
