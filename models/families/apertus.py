"""ApertusForCausalLM (Apertus).

Differences from Llama: RMSNorm of queries and keys, per head; an MLP without a gate, with the trained
activation xIELU.

Source: Project Apertus, Apertus: Democratizing Open and Compliant LLMs, 2025; Huang and Schlag, Deriving
Activation Functions Using Integration, 2024.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_paged.models.families.blocks import UngatedMLP, renamed
from jax_paged.models.families.llama import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import WeightTable
from jax_paged.models.layers import parameter

TABLE = renamed(
    {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
)


@dataclasses.dataclass(frozen=True)
class ApertusConfig(LlamaConfig):
    """Configuration of an Apertus."""

    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "xielu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 12000000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12000000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    }
    activations: ClassVar[tuple[str, ...]] = ("xielu",)
    fixed: ClassVar[dict[str, Any]] = {"mlp_bias": False, "qk_norm": True}


class XIELU(Module):
    """The activation xIELU: quadratic for positive and exponential for negative inputs, with slope beta at 0.

    f(x) = alpha_p * x**2 + beta * x for x > 0, and (beta + alpha_n) * (exp(x) - 1 - x) + beta * x otherwise.
    """

    def __init__(self, *, dtype: jnp.dtype) -> None:
        # The values of alpha after softplus are 0.8 and 0.3. beta is added to the second one.
        self.alpha_p = parameter(jnp.log(jnp.expm1(jnp.full(1, 0.8))).astype(dtype), (None,))
        self.alpha_n = parameter(jnp.log(jnp.expm1(jnp.full(1, 0.3))).astype(dtype), (None,))
        self.beta = parameter(jnp.asarray(0.5, dtype), ())

    def forward(self, x: Float[Array, "*t i"], context: ForwardContext) -> Float[Array, "*t i"]:
        """Returns the activation of each element."""
        x32, beta = x.astype(jnp.float32), self.beta[...].astype(jnp.float32)
        alpha_p, alpha_n = (jax.nn.softplus(a[...].astype(jnp.float32)) for a in (self.alpha_p, self.alpha_n))
        # The limit of -1e-6 is as in transformers. Without a limit, the exponential of a large positive
        # number, which is not used, could be infinite, and so could its gradient.
        negative = jnp.minimum(x32, -1e-6)
        curved = jnp.where(x32 > 0, alpha_p * x32 * x32, (jnp.expm1(negative) - x32) * (beta + alpha_n))
        return (curved + beta * x32).astype(x.dtype)


class ApertusMLP(UngatedMLP):
    """An MLP without a gate, with the activation xIELU."""

    def __init__(self, config: Any, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.act_fn = XIELU(dtype=dtype)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the MLP."""
        return self.down_proj(self.act_fn(self.up_proj(x, context), context), context)


class ApertusDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with ApertusMLP."""

    mlp_class: ClassVar[Callable[..., Module]] = ApertusMLP


class ApertusForCausalLM(LlamaForCausalLM):
    """A Llama with the activation xIELU."""

    config_class: ClassVar[type[LlamaConfig]] = ApertusConfig
    layer_class: ClassVar[Callable[..., Module]] = ApertusDecoderLayer
    weight_table: ClassVar[WeightTable] = TABLE.with_names(
        ignored=rf"{TABLE.ignored}|model\.layers\.\d+\.mlp\.act_fn\.eps"
    )
