"""The adapters on the device: arrays with a slot for each, which are written while requests run."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.multimodal import ImageSettings
from jax_paged.core.scheduler_output import AdapterLoad
from jax_paged.errors import check
from jax_paged.models.causal_lm import CausalLM, LanguageModel
from jax_paged.models.checkpoint import read_config, resolve_model_dir
from jax_paged.models.features.lora.layers import LoraLayout, lora_maps
from jax_paged.models.features.multimodal import ImageSpec, PatchSpec
from jax_paged.models.parallel.sharding import DeviceGrid
from jax_paged.models.registry import IMAGE_MODELS, get_architecture
from jax_paged.models.weights import LoadedModel
from jax_paged.worker.compilation.programs import Program, TraceContext

# Adapters in host memory, if nobody says how many.
DEFAULT_CPU_LORAS = 16


class Additions(NamedTuple):
    """What requests may bring beside tokens; the names are those of TraceContext.

    Args:
        lora: The arrays of adapters; None if there are none.
        embed_path: Where the table of token embeddings stands, if prompts may have vectors.
        embed_size: Numbers of such a vector; 0 if there are none.
        image_spec: How prompts have images, which become such vectors; None if they have none.
    """

    lora: LoraLayout | None
    embed_path: str
    embed_size: int
    image_spec: ImageSpec | PatchSpec | None

    def settings(self, args: EngineArgs) -> dict[str, Any]:
        """Returns the fields of EngineConfig that they determine."""
        maps, images = self.lora.maps if self.lora else (), None
        if self.image_spec is not None:
            images = ImageSettings.of(args, self.image_spec)
        return {
            "max_loras": args.max_loras if self.lora else 0,
            "max_lora_rank": args.max_lora_rank,
            "max_cpu_loras": args.max_cpu_loras or max(args.max_loras, DEFAULT_CPU_LORAS),
            "lora_maps": {m.name: (m.num_in, m.num_out) for m in maps},
            "embed_size": self.embed_size if args.enable_prompt_embeds else 0,
            "images": images,
        }


def check_images(args: EngineArgs, loaded: LoadedModel | LanguageModel | None) -> None:
    """Checks what an engine is asked for that a model with or without images can't have; reads no weights.

    Args:
        args: Name the model.
        loaded: A model in memory in place of it.

    Raises:
        ValueError: If it is.
    """
    if loaded is None:
        config = read_config(resolve_model_dir(args.model), args.hf_overrides or {})
        name = get_architecture(config)
    else:
        name = type(loaded.model if isinstance(loaded, LoadedModel) else loaded).__name__
    if name not in IMAGE_MODELS:
        given, allowed = args.mm_processor_kwargs, f"None because {name} reads no images"
        check(not given, "mm_processor_kwargs", given, allowed)
        return
    what = f"with {name}, which reads images"
    for setting, only in (
        ("enable_lora", False),
        ("pipeline_parallel_size", 1),
        ("distributed_executor_backend", "uni"),
    ):
        check(getattr(args, setting) == only, setting, getattr(args, setting), f"{only!r} {what}")


def plan_additions(args: EngineArgs, loaded: LoadedModel) -> Additions:
    """Returns what requests may bring, for a model whose kernels are not packed yet.

    Raises:
        ValueError: If the model can't have it.
    """
    spec = loaded.model.image_spec
    lora, path = None, loaded.model.embed_path if args.enable_prompt_embeds or spec else ""
    if args.enable_lora:
        ok = isinstance(loaded.model, CausalLM)
        check(ok, "enable_lora", True, f"False for {loaded.architecture}, which has an encoder")
        lora = LoraLayout(lora_maps(loaded.model), args.max_loras, args.max_lora_rank, loaded.dtype)
    ok = bool(path) or not args.enable_prompt_embeds
    check(ok, "enable_prompt_embeds", True, f"False for {loaded.architecture}")
    return Additions(lora, path, loaded.config.hidden_size if path else 0, spec)


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

        arrays, new = context.lora_arrays(), context.lora_arrays(num_slots=1)
        jitted = jax.jit(load, donate_argnums=0, out_shardings=[x.sharding for x in arrays])
        return jitted.trace(arrays, context.shape((), jnp.int32), new)


class AdapterArrays:
    """Owns the arrays of all slots.

    Args:
        layout: Of the arrays; None if requests have no adapters.
        grid: The devices that share them.

    Attributes:
        arrays: An argument of the steps of requests with adapters.
    """

    def __init__(self, layout: LoraLayout | None, grid: DeviceGrid) -> None:
        self._layout, self._grid = layout, grid
        self._shardings = [grid.sharding(split) for split in layout.splits] if layout else []
        shapes = layout.shapes(layout.num_slots * layout.rank, grid) if layout else []
        self.arrays = [
            jnp.zeros(shape, layout and layout.dtype, device=where)
            for shape, where in zip(shapes, self._shardings, strict=True)
        ]
        self._on_host: list[np.ndarray] = []

    def load(self, run: Callable[..., Any], loads: tuple[AdapterLoad, ...]) -> None:
        """Writes adapters to their slots, for the steps that are dispatched from now on."""
        for slot, _, adapter in loads:
            assert self._layout is not None, "there is no slot for an adapter"
            assert adapter is not None, "the engine adds the weights of an adapter when a step is scheduled"
            padded = self._layout.padded(adapter, self._grid)
            self.arrays = run(LoadAdapterProgram(), self.arrays, np.int32(slot - 1), padded)

    def free(self) -> None:
        """Moves the arrays to host memory; no program may run until `restore`."""
        self._on_host = [np.array(array) for array in self.arrays]
        self.close()

    def restore(self) -> None:
        """Brings the arrays back that `free` has moved."""
        if self._on_host:
            self.arrays = jax.device_put(self._on_host, self._shardings)
            self._on_host = []

    def close(self) -> None:
        """Frees the arrays."""
        for array in self.arrays:
            array.delete()
        self.arrays = []
