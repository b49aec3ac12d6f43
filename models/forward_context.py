"""What one forward pass carries to every module of a model, and the way every module is called.

    model(tokens)        model.paged(tokens, kv_cache, metadata)
          |                         |
    dense_context()          paged_context()       how tokens attend differs, nothing else does
          |                         |
          +------- context ---------+
                      |
    hidden(tokens, context)
      |-- embed_tokens(tokens, context)
      `-- layers[i](x, context)
            |-- self_attn(x, context)              q_proj, k_proj, v_proj(x, context); context.attend(...)
            `-- mlp(x, context)                    gate_proj, up_proj, down_proj(x, context)

Each call `module(x, context)` passes through `context.run(module, x)`, so what is to happen at any module is
decided in one place. There is no global and no thread-local: a context lives while its pass is traced.
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
from jax_paged.models.recurrent.recurrence import Recur, no_states
from jax_paged.models.rope import Rope, Rotation
from jax_paged.pallas_kernels import grouped_loop


class Attend(Protocol):
    """How the tokens of a layer attend: (layer, q, k, v) to the attention of every token.

    `layer` is an index into the model's kv_cache_specs(); the window comes from the spec. With None for k and
    v, queries attend to the keys and values that an earlier call gave for that layer. The options are those
    of dense_attention. Of a LatentAttentionSpec, k and v are the same vectors, of one head, and what is
    returned has the first value_dim numbers of a head.
    """

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
    ) -> Array: ...


class GroupedMatmul(Protocol):
    """What multiplies the rows of experts: grouped_matmul, with a backend."""

    def __call__(self, x: Array, kernels: Array, group_sizes: Array, /) -> Array: ...


class CrossAttend(Protocol):
    """How the tokens of a layer attend to the encoder's output: (layer, q) to each token's attention."""

    def __call__(self, layer: int, q: Array, *, scale: float) -> Array: ...


def no_cross_attention(layer: int, q: Array, *, scale: float) -> Array:
    raise AssertionError(f"layer {layer} asks for cross attention in a pass without an encoder's output")


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardContext:
    """What a forward pass carries to every module.

    Immutable: a part of a model that needs another context for the modules below it derives one with
    dataclasses.replace. What is to reach every layer becomes a field here, and what is to happen at every
    module becomes a line in `run`.

    Args:
        model: The module that `path` is relative to.
        positions: int32, position of each token in its sequence. Its shape is that of the token rows: the
            leading dimensions of what every module takes and returns.
        attend: How tokens attend to their sequence.
        cross_attend: How tokens attend to the encoder's output.
        recur: How the states that layers keep are advanced, see recurrence.py.
        grouped_matmul: What multiplies the rows of experts; by default what can be differentiated.
        mrope_positions: int32 [3, ...], of each token its rotary positions along three axes; None if they are
            those of `positions`.
        rotations: By how much the tokens are rotated, for each rope of the model.
        grid: The devices that the model is divided among; None for one.
        hooks: What happens to the output of some modules, by their paths; see hooks.py.
        changes: What becomes of a module's output before that, by what it was given and has returned: what
            adapters add (lora.py), vectors in place of tokens.
    """

    model: nnx.Module
    positions: Int[Array, "*t"]
    attend: Attend
    cross_attend: CrossAttend = no_cross_attention
    grouped_matmul: GroupedMatmul = grouped_loop.grouped_matmul
    mrope_positions: Int[Array, "3 *t"] | None = None
    rotations: Mapping[Rope, Rotation] = types.MappingProxyType({})
    grid: DeviceGrid | None = None
    recur: Recur = no_states
    hooks: Mapping[str, Callable[[Array], Array]] = types.MappingProxyType({})
    changes: Mapping[str, Callable[[Any, Array], Array]] = types.MappingProxyType({})

    def run(self, module: "Module", x: Any) -> Array:
        """Returns module.forward(x, self), or what changes and a hook make of it. Every call comes here.

        Only gate and up of an MLP whose kernels are packed, and that nothing changes, are not called, see
        layers.gated.

        Args:
            module: The module that was called.
            x: What it was called with.
        """
        y = module.forward(x, self)
        if self.changes and (change := self.changes.get(self.path(module))):
            y = change(x, y)
        hook = self.hooks.get(self.path(module)) if self.hooks else None
        return y if hook is None else hook(y)

    def sees(self, *modules: "Module") -> bool:
        """Returns whether anything happens to the output of one of some modules."""
        if not self.hooks and not self.changes:
            return False
        paths = set(map(self.path, modules))
        return bool(self.hooks.keys() & paths or self.changes.keys() & paths)

    def parts(self, y: Array, units: Sequence[Units]) -> list[Array]:
        """Takes the output of a map apart that computes several things at once, each in these units."""
        if self.grid is not None:
            return self.grid.parts(y, units)
        return jnp.split(y, list(itertools.accumulate(u.num * u.size for u in units[:-1])), axis=-1)

    def path(self, module: "Module") -> str:
        """Returns where a module stands in the model, such as "layers.7.self_attn.q_proj".

        The weights of the module have this path too, in the model's state and in its WeightTable.
        """
        assert module in self._paths, f"{type(module).__name__} is not a part of the context's model"
        return self._paths[module]

    @functools.cached_property
    def _paths(self) -> "dict[Module, str]":
        modules = nnx.iter_modules(self.model)
        return {m: ".".join(map(str, path)) for path, m in modules if isinstance(m, Module)}


class Module(nnx.Module):
    """A part of a model; called as `module(x, context)`, it computes what its `forward` returns.

    Attributes:
        same_input: Names of linear maps in it that are applied to the same rows, and may be packed together.
    """

    same_input: ClassVar[tuple[str, ...]] = ()

    def __call__(self, x: Any, context: ForwardContext) -> Array:
        return context.run(self, x)

    @abc.abstractmethod
    def forward(self, x: Any, context: ForwardContext) -> Array:
        """Returns the output of every token row of x; called by the context only."""


class MissingLayer(Module):
    """In the place of a layer that another stage of a pipeline has: paths stay those of the whole model."""

    def forward(self, x: Any, context: ForwardContext) -> Array:
        raise AssertionError("another stage has this layer")
