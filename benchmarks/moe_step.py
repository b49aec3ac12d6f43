"""Time of a mixture-of-experts layer, by the number of experts and the number of active experts.

    python benchmarks/moe_step.py

The layer has Mixtral's structure with smaller matrices. Each token uses two experts, and the tokens of a step
use `active` experts together. The time should depend on the number of active experts and not on the total
number. "ragged_dot" is the same layer with jax.lax.ragged_dot, which multiplies every row by the matrices of
every expert on a CPU. Times are the best of several runs, in float32.
"""

import argparse
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

# Mixtral 8x7B has a hidden size of 4096 and an intermediate size of 14336.
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
    """Router that sends token i to the experts 2i and 2i + 1, modulo the number of active experts."""

    def __init__(self, num_experts: int, active: int) -> None:
        self.num_experts, self.active = num_experts, active

    def forward(self, x: jax.Array, context: ForwardContext) -> jax.Array:
        """Returns the router logits [tokens, experts]: 1 for the two chosen experts, otherwise 0."""
        rows = context.positions[:, None]
        chosen = (2 * rows + jnp.arange(2)) % self.active
        return jnp.sum(jax.nn.one_hot(chosen, self.num_experts), axis=1)


def no_attention(*args: Any, **options: Any) -> jax.Array:
    """Raises AssertionError, because a layer of experts does not call attention."""
    raise AssertionError("a layer of experts must not call attention")


def milliseconds(num_experts: int, active: int, num_tokens: int, grouped: Any) -> float:
    """Returns the shortest time of a call of the layer.

    Args:
        num_experts: Total number of experts.
        active: Number of experts that the tokens use.
        num_tokens: Number of tokens in the step.
        grouped: Function for the products of the experts, with the signature of jax.lax.ragged_dot.
    """
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
    """Measures all combinations and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
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
