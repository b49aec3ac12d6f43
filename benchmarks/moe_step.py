"""How a step's time follows the experts that are chosen: a layer of experts of Mixtral's shape, scaled down.

    python benchmarks/moe_step.py

For each number of experts, and of tokens in the step, the tokens of a step go to `active` experts, two each.
The time must follow the active ones and not the number there is. `ragged_dot` is the same step with
jax.lax.ragged_dot, which computes all of them on this kind of machine. Best of several runs, float32.
"""

import functools
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_paged.models import moe
from jax_paged.models.families.mixtral import MixtralConfig
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.pallas_kernels.grouped_matmul import grouped_matmul

# Mixtral 8x7B has 4096 and 14336.
HF_CONFIG: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


class FixedRouter(Module):
    """Sends token i to the experts 2i and 2i + 1 of the active ones."""

    def __init__(self, num_experts: int, active: int) -> None:
        self.num_experts, self.active = num_experts, active

    def forward(self, x: jax.Array, context: ForwardContext) -> jax.Array:
        rows = context.positions[:, None]
        chosen = (2 * rows + jnp.arange(2)) % self.active
        return jnp.sum(jax.nn.one_hot(chosen, self.num_experts), axis=1)


def no_attention(*args: Any, **options: Any) -> jax.Array:
    raise AssertionError("experts do not attend")


def milliseconds(num_experts: int, active: int, num_tokens: int, grouped: Any) -> float:
    """Returns the best time of a call of the layer."""
    config = MixtralConfig.from_hf(HF_CONFIG | {"num_local_experts": num_experts})
    layer = moe.MoeMLP(config, 0, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    layer.gate = FixedRouter(num_experts, active)
    graph, state = nnx.split(layer)

    @jax.jit
    def call(state: nnx.State, x: jax.Array) -> jax.Array:
        layer = nnx.merge(graph, state)
        context = ForwardContext(layer, jnp.arange(num_tokens), no_attention, grouped_matmul=grouped)
        return layer(x, context)

    x = jax.random.normal(jax.random.key(0), (num_tokens, config.hidden_size))
    call(state, x).block_until_ready()
    times = []
    while len(times) < 3 or (sum(times) < 0.2 and len(times) < 50):
        start = time.perf_counter()
        call(state, x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> None:
    ours = functools.partial(grouped_matmul, backend="xla")
    print(f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax {jax.__version__}")
    print(f"{'experts':>8} {'active':>7} {'tokens':>7} {'ms':>8} {'ragged_dot ms':>14}")
    for num_tokens in (1, 16, 128):
        for num_experts in (8, 32, 64):
            for active in (2, 8, 32):
                if active <= min(num_experts, 2 * num_tokens):
                    dense = milliseconds(num_experts, active, num_tokens, jax.lax.ragged_dot)
                    best = milliseconds(num_experts, active, num_tokens, ours)
                    print(f"{num_experts:>8} {active:>7} {num_tokens:>7} {best:>8.2f} {dense:>14.2f}")


if __name__ == "__main__":
    main()
