"""LoRA adapters on the device: weight arrays with a fixed number of slots, written while requests run."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh
from jaxtyping import Array

from jax_paged.config.engine_args import EngineArgs
from jax_paged.core.scheduler_output import AdapterLoad
from jax_paged.errors import check
from jax_paged.models.causal_lm import CausalLM
from jax_paged.models.features.lora.layers import LoraLayout, RowFunction, lora_maps, row_functions, unchanged
from jax_paged.models.parallel.sharding import TENSOR, DeviceGrid
from jax_paged.models.weights import LoadedModel
from jax_paged.worker.compilation.programs import Program, TraceContext
from jax_paged.worker.compilation.traced_values import TracedStep

# Default number of adapters in host memory.
DEFAULT_CPU_LORAS = 16


def plan_adapters(args: EngineArgs, loaded: LoadedModel) -> LoraLayout | None:
    """Returns the layout of the adapter arrays for a model whose weights are not packed; None without LoRA.

    Raises:
        ValueError: If the model does not support LoRA.
    """
    if not args.enable_lora:
        return None
    ok = isinstance(loaded.model, CausalLM)
    check(ok, "enable_lora", True, f"False for {loaded.architecture}, which has an encoder")
    return LoraLayout(lora_maps(loaded.model), args.max_loras, args.max_lora_rank, loaded.dtype)


def adapter_settings(args: EngineArgs, lora: LoraLayout | None) -> dict[str, Any]:
    """Returns the fields of EngineConfig that describe adapters."""
    maps = lora.maps if lora else ()
    return {
        "max_loras": args.max_loras if lora else 0,
        "max_lora_rank": args.max_lora_rank,
        "max_cpu_loras": args.max_cpu_loras or max(args.max_loras, DEFAULT_CPU_LORAS),
        "lora_layer_sizes": {m.name: (m.num_in, m.num_out) for m in maps},
    }


@dataclasses.dataclass(frozen=True)
class LoadAdapterProgram(Program):
    """Program that writes an adapter to a slot.

    Its arguments are the arrays of all slots (donated), the slot index counted from 0, and the arrays of the
    adapter as returned by LoraLayout.padded. It returns the arrays of all slots.
    """

    def __str__(self) -> str:
        return "load adapter"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""
        lora = context.features.lora
        assert lora is not None, "the engine has no adapters"
        rank = lora.rank

        def load(arrays: list[Array], slot: Array, new: list[Array]) -> list[Array]:
            first = slot * rank
            # The arrays are A [in, slots * rank] and B [slots * rank, out] of each linear map in turn.
            starts = ((0, first) if i % 2 == 0 else (first, 0) for i in range(len(arrays)))
            return [lax.dynamic_update_slice(*each) for each in zip(arrays, new, starts, strict=True)]

        arrays, new = adapter_shapes(context), adapter_shapes(context, num_slots=1)
        jitted = jax.jit(load, donate_argnums=0, out_shardings=[x.sharding for x in arrays])
        return jitted.trace(arrays, context.shape((), jnp.int32), new)


def adapter_shapes(context: TraceContext, num_slots: int | None = None) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of the adapter arrays, with `num_slots` slots or with all of them."""
    if (lora := context.features.lora) is None:
        return []
    if context.mesh is None:
        grid, shardings = DeviceGrid(AbstractMesh((1,), (TENSOR,))), [None] * len(lora.splits)
    else:
        grid = DeviceGrid(context.mesh)
        shardings = [grid.sharding(split) for split in lora.splits]
    shapes = lora.shapes((num_slots or lora.num_slots) * lora.rank, grid)
    pairs = zip(shapes, shardings, strict=True)
    return [jax.ShapeDtypeStruct(shape, lora.dtype, sharding=sharding) for shape, sharding in pairs]


def adapter_edits(lora: LoraLayout, step: TracedStep) -> Mapping[str, RowFunction]:
    """Returns functions that add the effect of adapters to the outputs of linear layers, by module path."""
    if step.bucket.has_adapters:
        return row_functions(lora, step.inputs.adapters, step.by_token(step.fields["adapter_slots"]))
    # In float32, a sequence without an adapter gets bitwise equal results in steps with and without adapters.
    # For that, functions without effect make XLA compute the layers in the same way. In other dtypes, the
    # results may differ.
    return unchanged(lora) if step.context.dtype == jnp.float32 else {}


class AdapterArrays:
    """Device arrays of all adapter slots.

    Args:
        layout: Layout of the arrays.
        grid: The devices that share the arrays.

    Attributes:
        arrays: The arrays, an argument of all steps with adapters.
    """

    def __init__(self, layout: LoraLayout, grid: DeviceGrid) -> None:
        self._layout, self._grid = layout, grid
        self._shardings = [grid.sharding(split) for split in layout.splits]
        shapes = layout.shapes(layout.num_slots * layout.rank, grid)
        self.arrays = [
            jnp.zeros(shape, layout.dtype, device=sharding)
            for shape, sharding in zip(shapes, self._shardings, strict=True)
        ]
        self._on_host: list[np.ndarray] = []

    def load(self, run: Callable[..., Any], loads: tuple[AdapterLoad, ...]) -> None:
        """Writes adapters to their slots. Steps that are dispatched afterwards use them."""
        for slot, _, adapter in loads:
            assert adapter is not None, "a scheduled adapter load has no weights"
            padded = self._layout.padded(adapter, self._grid)
            self.arrays = run(LoadAdapterProgram(), self.arrays, np.int32(slot - 1), padded)

    def free(self) -> None:
        """Moves the arrays to host memory. No program may run until `restore`."""
        self._on_host = [np.array(array) for array in self.arrays]
        self.close()

    def restore(self) -> None:
        """Moves the arrays back to the device if they were moved to host memory."""
        if self._on_host:
            self.arrays = jax.device_put(self._on_host, self._shardings)
            self._on_host = []

    def close(self) -> None:
        """Frees the device arrays."""
        for array in self.arrays:
            array.delete()
        self.arrays = []
