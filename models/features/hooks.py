"""Hooks: user functions that read or change the output of a module of the model.

    Hook("layers.7.mlp", fn, params)

    module.forward(x, context) -> y [rows, ...]
    fn(params, y, args [rows, num_args]) -> y, or (y, captured [rows, ...])

A row is one token. The rows of requests that do not ask for the hook keep exactly the same y.
"""

import dataclasses
import difflib
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jax_paged.arguments.shown_values import shown
from jax_paged.models.causal_lm import CausalLM, LanguageModel
from jax_paged.models.forward_context import Module

# Function of a hook: takes the parameters, the activations and the arguments of the rows.
HookFunction = Callable[[Any, Array, Array], Array | tuple[Array, Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class Hook:
    """Function that reads or changes the output of a module, for the requests that ask for it by name.

    Args:
        path: Path of the module, such as "layers.7.mlp" or "layers.7.self_attn.o_proj".
        fn: fn(params, activation, args) returns the new activation, or a pair of the new activation and the
            captured values. `activation` is [rows, ...] in the dtype of the module's output, `args` is
            float32 [rows, num_args], and the captured values are [rows, ...]. The function is traced
            into the compiled steps, so it must be a pure function of arrays. The rows are tokens of many
            requests, and padding, so each row must be computed independently of the others.
        params: A pytree of arrays that is passed to `fn`.
        num_args: Number of floats that a request passes to `fn`.
        name: The name that requests use; by default the path.
    """

    path: str
    fn: HookFunction
    params: Any = None
    num_args: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.num_args, numbers.Integral) or self.num_args < 0:
            raise ValueError(f"`num_args` must be an integer of at least 0, got {shown(self.num_args)}")
        object.__setattr__(self, "num_args", int(self.num_args))
        object.__setattr__(self, "name", self.name or self.path)


def num_columns(hooks: Sequence[Hook]) -> int:
    """Returns the number of columns of the array that switches hooks on and holds their arguments.

    Each hook has one column for the switch, and one for each argument.

    Args:
        hooks: The hooks.
    """
    return sum(1 + hook.num_args for hook in hooks)


def functions_by_path(
    hooks: Sequence[Hook],
    params: Sequence[Any],
    columns: Float[Array, "rows columns"],
    num_leading: int,
    captured: dict[str, Array],
) -> dict[str, Callable[[Array], Array]]:
    """Returns the functions to apply to the outputs of modules, by path, for `ForwardContext.hooks`.

    Args:
        hooks: The hooks. Those with the same path run in this order.
        params: The parameters of each hook.
        columns: float32 [rows, num_columns(hooks)]. For each hook: whether it is on for the row (not 0), and
            its arguments.
        num_leading: Number of leading dimensions of an activation that together index its rows.
        captured: Receives the captured values by the name of the hook, float32 [rows, ...], while the pass is
            traced. They are 0 in rows for which the hook is off.
    """
    functions: dict[str, Callable[[Array], Array]] = {}
    first = 0
    for hook, own in zip(hooks, params, strict=True):
        is_on, args = columns[:, first] != 0, columns[:, first + 1 : first + 1 + hook.num_args]
        first += 1 + hook.num_args
        before = functions.get(hook.path, lambda y: y)

        def after(
            y: Array,
            hook: Hook = hook,
            own: Any = own,
            is_on: Array = is_on,
            args: Array = args,
            before=before,
        ) -> Array:
            y = before(y)
            rows = y.reshape(-1, *y.shape[num_leading:])
            result = hook.fn(own, rows, args)
            new, values = result if isinstance(result, tuple) else (result, None)
            _check_shape(hook, "activation", new, rows.shape)
            if values is not None:
                _check_shape(hook, "captured values", values, (len(rows), *values.shape[1:]))
                captured[hook.name] = jnp.where(_broadcastable(is_on, values), values.astype(jnp.float32), 0)
            return jnp.where(_broadcastable(is_on, rows), new.astype(rows.dtype), rows).reshape(y.shape)

        functions[hook.path] = after
    return functions


def recording_hooks(
    paths: Sequence[str], hooks: Mapping[str, Callable[[Array], Array]], found: dict[str, Array]
) -> dict[str, Callable[[Array], Array]]:
    """Returns hooks that also record the outputs of some modules, after all other hooks.

    Args:
        paths: Paths of the modules.
        hooks: The other hooks, as in `ForwardContext.hooks`.
        found: Receives the outputs by path while the pass is traced.
    """

    def noting(path: str) -> Callable[[Array], Array]:
        before = hooks.get(path, lambda y: y)

        def note(y: Array) -> Array:
            found[path] = before(y)
            return found[path]

        return note

    return {**hooks, **{path: noting(path) for path in paths}}


def check_hooks(model: LanguageModel, hooks: Sequence[Hook]) -> dict[str, tuple[int, ...]]:
    """Checks hooks by tracing a model with them, without computing anything.

    Args:
        model: The model, or its outline.
        hooks: The hooks.

    Returns:
        The shape of the captured values of one row, by the name of each hook that captures values.

    Raises:
        ValueError: If no module has the path of a hook, if the function returns an array of the wrong shape,
            if two hooks have the same name, or if the model is not a CausalLM.
    """
    if not hooks:
        return {}
    names = [hook.name for hook in hooks]
    if len(set(names)) < len(names):
        raise ValueError(f"the names of `hooks` must be unique, got {names}")
    if not isinstance(model, CausalLM):
        raise ValueError(
            f"`hooks` must be empty because {type(model).__name__} is not a decoder-only model, got {names}"
        )
    paths = {".".join(map(str, path)) for path, m in nnx.iter_modules(model) if isinstance(m, Module)}
    graphdef, state = nnx.split(model)
    columns = jnp.zeros((2, num_columns(hooks)))
    ran: dict[str, Array] = {}

    def run(state: Any, params: Any) -> dict[str, Array]:
        captured: dict[str, Array] = {}
        merged, tokens = nnx.merge(graphdef, state), jnp.zeros((1, 2), jnp.int32)
        functions = functions_by_path(hooks, params, columns, 2, captured)
        context = merged.dense_context(tokens)
        functions = recording_hooks([*functions], functions, ran)
        merged.hidden(tokens, dataclasses.replace(context, hooks=functions))
        return captured

    captured = jax.eval_shape(run, state, [hook.params for hook in hooks])
    for hook in hooks:
        if hook.path not in ran:
            near = difflib.get_close_matches(hook.path, paths - {hook.path}, 4, 0.3)
            raise ValueError(
                f"`path` must be the path of a module whose inputs are token rows, such as "
                f"{', '.join(map(repr, near or sorted(paths)[:4]))}, got {shown(hook.path)}"
            )
    return {name: values.shape[1:] for name, values in captured.items()}


def dense_logits(
    model: CausalLM,
    tokens: Int[Array, "b t"],
    hooks: Sequence[Hook],
    hook_args: Mapping[str, Any],
) -> tuple[Float[Array, "b t v"], dict[str, Float[Array, "b t *c"]]]:
    """Returns the logits of a dense batch with hooks, and the captured values.

    Args:
        model: The model.
        tokens: int32 [B, T], token ids.
        hooks: The hooks.
        hook_args: The arguments of the hooks that are on, by name: [num_args], or [B, num_args] for separate
            arguments of each sequence.

    Returns:
        float32 [B, T, V], and the captured values, float32 [B, T, ...], by the name of the hook.
    """
    b, t = tokens.shape
    check_names(hook_args, [hook.name for hook in hooks])
    parts: list[Array] = []
    for hook in hooks:
        args = jnp.asarray(hook_args.get(hook.name, jnp.zeros(hook.num_args)), jnp.float32)
        parts.append(jnp.full((b, 1), float(hook.name in hook_args)))
        parts.append(jnp.broadcast_to(jnp.atleast_1d(args), (b, hook.num_args)))
    columns = jnp.repeat(jnp.concatenate(parts, axis=1), t, axis=0)
    captured: dict[str, Array] = {}
    functions = functions_by_path(hooks, [hook.params for hook in hooks], columns, 2, captured)
    context = dataclasses.replace(model.dense_context(tokens), hooks=functions)
    logits = model.logits(model.hidden(tokens, context))
    return logits, {name: values.reshape(b, t, *values.shape[1:]) for name, values in captured.items()}


def check_names(hook_args: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises a ValueError if a hook is requested that does not exist.

    Args:
        hook_args: The arguments of the requested hooks by name.
        names: Names of all hooks.
    """
    for name in hook_args:
        if name not in names:
            known = ", ".join(map(repr, names)) or "none"
            raise ValueError(f"each name in `hook_args` must be that of a hook ({known}), got {shown(name)}")


def _broadcastable(is_on: Bool[Array, " rows"], rows: Array) -> Array:
    return is_on.reshape(-1, *[1] * (rows.ndim - 1))


def _check_shape(hook: Hook, what: str, value: Array, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(f"the shape of the {what} of hook {hook.name!r} must be {shape}, got {value.shape}")
