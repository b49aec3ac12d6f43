"""NemotronForCausalLM (Nemotron-4 and Minitron).

Differences from Llama: LayerNorm with the scale 1 + weight; partial rotary embedding; an MLP without a gate,
with the squared ReLU as activation.

Source: Parmar et al., Nemotron-4 15B Technical Report, 2024; semantics as in Hugging Face's
NemotronForCausalLM.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_paged.models.families.blocks import UngatedDecoderLayer
from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.layers import LayerNorm


@dataclasses.dataclass(frozen=True)
class NemotronConfig(LlamaConfig):
    """Configuration of a Nemotron."""

    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    }
    epsilon_name: ClassVar[str] = "norm_eps"
    is_partly_rotated: ClassVar[bool] = True


class NemotronLayerNorm(LayerNorm):
    """LayerNorm with the scale 1 + weight."""

    def forward(self, x: Float[Array, "... e"], context: ForwardContext) -> Float[Array, "... e"]:
        """Returns the normalized input."""
        return (self.normalize(x) + super().forward(x.astype(jnp.float32), context)).astype(x.dtype)


class NemotronDecoderLayer(UngatedDecoderLayer):
    """Llama's layer with NemotronLayerNorm and an MLP without a gate."""

    norm_class: ClassVar[Callable[..., Module]] = NemotronLayerNorm


class NemotronForCausalLM(LlamaForCausalLM):
    """A Llama with LayerNorm and MLPs without a gate."""

    config_class: ClassVar[type[LlamaConfig]] = NemotronConfig
    layer_class: ClassVar[Callable[..., Module]] = NemotronDecoderLayer
    norm_class: ClassVar[Callable[..., Any]] = NemotronLayerNorm
