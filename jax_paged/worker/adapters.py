"""The adapters on the device: arrays with a slot for each, which are written while requests run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array

from jax_paged.core.scheduler_output import AdapterLoad
from jax_paged.models.lora import LoraLayout
from jax_paged.worker.programs import Program, TraceContext


@dataclasses.dataclass(frozen=True)
class LoadAdapterProgram(Program):
    """Writes an adapter to a slot.

    Its arguments are the arrays of all slots (donated), the slot less 1, and the arrays of the adapter, as
    LoraLayout.padded returns them. It returns the arrays of all slots.
    """

    def __str__(self) -> str:
        return "load adapter"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        assert context.lora is not None, "only an engine with adapters has it"
        rank = context.lora.rank

        def load(arrays: list[Array], slot: Array, new: list[Array]) -> list[Array]:
            first = slot * rank
            starts = ((0, first) if i % 2 == 0 else (first, 0) for i in range(len(arrays)))
            return [lax.dynamic_update_slice(*each) for each in zip(arrays, new, starts, strict=True)]

        shapes = [shape for m in context.lora.maps for shape in ((m.num_in, rank), (rank, m.num_out))]
        new = [context.shape(shape, context.lora.dtype) for shape in shapes]
        arrays = context.lora_arrays()
        jitted = jax.jit(load, donate_argnums=0, out_shardings=[context.replicated] * len(arrays))
        return jitted.trace(arrays, context.shape((), jnp.int32), new)


class AdapterArrays:
    """Owns the arrays of all slots.

    Args:
        layout: Of the arrays.
        sharding: Of all of them.

    Attributes:
        arrays: An argument of the steps of requests with adapters.
    """

    def __init__(self, layout: LoraLayout, sharding: NamedSharding) -> None:
        self._layout, self._sharding = layout, sharding
        self.arrays = [jnp.zeros(shape, layout.dtype, device=sharding) for shape in layout.shapes()]

    def load(self, run: Callable[..., Any], loads: tuple[AdapterLoad, ...]) -> None:
        """Writes adapters to their slots, for the steps that are dispatched from now on."""
        for slot, _, adapter in loads:
            assert adapter is not None, "the engine adds the weights of an adapter when a step is scheduled"
            placed = jax.device_put([np.int32(slot - 1), self._layout.padded(adapter)], self._sharding)
            self.arrays = run(LoadAdapterProgram(), self.arrays, *placed)

    def close(self) -> None:
        """Frees the arrays."""
        for array in self.arrays:
            array.delete()
        self.arrays = []
