"""The context of a forward pass, and the way in which modules are called.

    model(tokens)        model.paged(tokens, kv_cache, metadata)
          |                         |
    dense_context()          paged_context()       same modules, different `attend`, `recur`, ...
          |                         |
          +------- context ---------+
                      |
    hidden(tokens, context)
      |-- embed_tokens(tokens, context)
      `-- layers[i](x, context)
            |-- self_attn(x, context)              q_proj, k_proj, v_proj(x, context); context.attend(...)
            `-- mlp(x, context)                    gate_proj, up_proj, down_proj(x, context)

Every call `module(x, context)` goes through `context.run(module, x)`. Behavior that applies to any module,
such as hooks and LoRA adapters, is implemented there once. There are no globals and no thread-locals: a
context exists only while its forward pass is traced.
"""

import abc
import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jax_paged.models.parallel.sharding import DeviceGrid, Units
from jax_paged.models.recurrent.recurrence import Recur, no_recurrence
from jax_paged.models.rope import Rope, Rotation
from jax_paged.pallas_kernels import grouped_loop


class SelfAttention(Protocol):
    """Self-attention function of a forward pass."""

    def __call__(
        self,
        layer: int,
        q: Array,
        k: Array | None,
        v: Array | None,
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        distance_bias: Array | None = None,
    ) -> Array:
        """Returns the attention output of every token row.

        Args:
            layer: Index into the model's kv_cache_specs(). The sliding window is taken from this spec.
            q: float [*T, H, D], queries.
            k: float [*T, K, D], keys in the form in which they are cached; None to attend to the keys and
                values that an earlier call passed for this layer.
            v: float [*T, K, D], values; None if `k` is None. For a LatentAttentionSpec, the same array as
                `k`.
            scale: Factor of the scores.
            soft_cap: See `attention.dense_attention`.
            sinks: float [H], see `attention.dense_attention`.
            distance_bias: float [H, n], see `attention.dense_attention`.

        Returns:
            float [*T, H, D], or [*T, H, value_dim] for a LatentAttentionSpec.
        """
        ...


class GroupedMatmul(Protocol):
    """Multiplication of rows by the weight matrices of experts: `grouped_matmul` with a fixed backend."""

    def __call__(self, x: Array, kernels: Array, group_sizes: Array, /) -> Array:
        """Returns the product of each expert's rows and its weight matrix.

        Args:
            x: float [N, I], rows sorted by expert.
            kernels: float [G, I, O], one matrix per expert.
            group_sizes: int32 [G], number of rows of each expert.

        Returns:
            float [N, O]; 0 in rows after the last expert's rows.
        """
        ...


class CrossAttention(Protocol):
    """Cross-attention function of a forward pass."""

    def __call__(self, layer: int, q: Array, *, scale: float) -> Array:
        """Returns the attention of the decoder's token rows to the encoder's output.

        Args:
            layer: Index of a CrossAttentionSpec in the model's kv_cache_specs().
            q: float [*T, H, D], queries.
            scale: Factor of the scores.

        Returns:
            float [*T, H, D].
        """
        ...


def no_cross_attention(layer: int, q: Array, *, scale: float) -> Array:
    """Raises an AssertionError: the default of `cross_attend` in passes without an encoder."""
    raise AssertionError(f"layer {layer} called cross_attend in a forward pass without encoder output")


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardContext:
    """Data and functions of one forward pass, passed to every module.

    A context is immutable. A module that needs another context for the modules below it creates one with
    `dataclasses.replace`. Add a field here for data that every layer needs, and a line in `run` for behavior
    that applies to every module.

    Args:
        model: The model that module paths are relative to.
        positions: int32 [*T], position of each token in its sequence. The inputs and outputs of all modules
            have the same leading dimensions.
        attend: Computes self-attention.
        cross_attend: Computes attention to the encoder's output.
        recur: Advances the recurrent states of layers; see recurrent/recurrence.py.
        grouped_matmul: Multiplies the rows of experts. The default is differentiable.
        mrope_positions: int32 [3, *T], rotary positions of each token along three axes (M-RoPE); None if all
            three are `positions`.
        rotations: Rotation of queries and keys, for each Rope of the model.
        grid: The devices that share the model (tensor parallelism); None for a single device.
        hooks: Functions that take and return the output of a module, by module path; see features/hooks.py.
        output_edits: Functions that take the input and the output of a module and return a new output, by
            module path. They run before the hooks. LoRA adapters and prompt embeddings are applied this way.
    """

    model: nnx.Module
    positions: Int[Array, "*t"]
    attend: SelfAttention
    cross_attend: CrossAttention = no_cross_attention
    grouped_matmul: GroupedMatmul = grouped_loop.grouped_matmul
    mrope_positions: Int[Array, "3 *t"] | None = None
    rotations: Mapping[Rope, Rotation] = types.MappingProxyType({})
    grid: DeviceGrid | None = None
    recur: Recur = no_recurrence
    hooks: Mapping[str, Callable[[Array], Array]] = types.MappingProxyType({})
    output_edits: Mapping[str, Callable[[Any, Array], Array]] = types.MappingProxyType({})

    def run(self, module: "Module", x: Any) -> Array:
        """Returns the output of a module after `output_edits` and `hooks` have been applied to it.

        All calls `module(x, context)` go through this method, with one exception: `layers.gated` computes the
        gate and up projections of an MLP in one operation if their weights are packed and neither has a hook
        or an output edit. The head is not called with a context, so hooks do not apply to it; see
        `LanguageModel.logits`.

        Args:
            module: The module to call.
            x: Its input.
        """
        y = module.forward(x, self)
        if self.output_edits and (edit := self.output_edits.get(self.path(module))):
            y = edit(x, y)
        hook = self.hooks.get(self.path(module)) if self.hooks else None
        return y if hook is None else hook(y)

    def is_edited(self, *modules: "Module") -> bool:
        """Returns whether a hook or an output edit applies to any of the given modules."""
        if not self.hooks and not self.output_edits:
            return False
        paths = set(map(self.path, modules))
        return bool(self.hooks.keys() & paths or self.output_edits.keys() & paths)

    def split_output(self, y: Array, units: Sequence[Units]) -> list[Array]:
        """Splits the output of a linear map that computes several projections at once.

        Args:
            y: float [..., W], the columns of all projections.
            units: The units of each projection, in order.

        Returns:
            One array float [..., w] per projection.
        """
        if self.grid is not None:
            return self.grid.split_output(y, units)
        return jnp.split(y, list(itertools.accumulate(u.num * u.size for u in units[:-1])), axis=-1)

    def path(self, module: "Module") -> str:
        """Returns the path of a module in the model, such as "layers.7.self_attn.q_proj".

        The paths of the module's weights, in the model's state and in its WeightTable, start with this path.
        """
        assert module in self._paths, f"{type(module).__name__} is not in the model of this forward context"
        return self._paths[module]

    @functools.cached_property
    def _paths(self) -> "dict[Module, str]":
        modules = nnx.iter_modules(self.model)
        return {m: ".".join(map(str, path)) for path, m in modules if isinstance(m, Module)}


class Module(nnx.Module):
    """Base class of the parts of a model. `module(x, context)` returns the output of `forward`.

    Attributes:
        same_input: Names of linear maps in this module that have the same input. Their weights may be packed
            together.
    """

    same_input: ClassVar[tuple[str, ...]] = ()

    def __call__(self, x: Any, context: ForwardContext) -> Array:
        """Calls the module through the context and returns its output; see ForwardContext.run.

        Args:
            x: The input of the module, usually float [*T, E].
            context: The context of this forward pass.
        """
        return context.run(self, x)

    @abc.abstractmethod
    def forward(self, x: Any, context: ForwardContext) -> Array:
        """Returns the output for every token row of x. Only the context calls this method."""


class MissingLayer(Module):
    """Placeholder for a layer of another pipeline stage.

    It keeps the layer indices, and therefore module paths, the same as in the whole model.
    """

    def forward(self, x: Any, context: ForwardContext) -> Array:
        """Raises an AssertionError because another stage has this layer."""
        raise AssertionError("this layer belongs to another pipeline stage")
