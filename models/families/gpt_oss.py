"""GptOssForCausalLM (gpt-oss).

Differences from Llama: a mixture of experts, with biases and a clamped SwiGLU, in place of every MLP;
attention sinks; biases in the projections of the attention; a sliding window in every other layer.

Source: gpt-oss-120b & gpt-oss-20b Model Card, 2025; sinks: Xiao et al., Efficient Streaming Language Models
with Attention Sinks, 2024; semantics as in Hugging Face's GptOssForCausalLM.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.families.llama import WEIGHT_TABLE, LlamaAttention, LlamaConfig, LlamaForCausalLM
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.layers import normal, parameter
from jax_paged.models.moe import Experts, MoeConfig, MoeDecoderLayer, MoeMLP, Multiply, RoutedTokens
from jax_paged.models.parallel.sharding import even
from jax_paged.models.quantization.quantized_linear import QuantizedWeight


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(MoeConfig):
    """Configuration of a gpt-oss.

    Args:
        swiglu_alpha: Factor in the sigmoid of the experts' activation.
        swiglu_limit: Upper limit of gate, and limit of the absolute value of up.
    """

    swiglu_alpha: float
    swiglu_limit: float

    quantization_methods: ClassVar[tuple[str, ...]] = ("mxfp4",)
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        num_layers = fields["num_hidden_layers"]
        types = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
        return (
            fields
            | {
                "mlp_bias": False,
                "windows": read.windows(num_layers, types, read.integer("sliding_window")),
                "moe_layers": tuple(range(num_layers)),
                "moe_intermediate_size": fields["intermediate_size"],
                # gpt-oss computes a softmax over the chosen experts. A softmax over all experts gives the
                # same weights if the weights of the chosen experts are then scaled to a sum of 1.
                "norm_topk_prob": True,
                "swiglu_alpha": read.number("swiglu_alpha", 1.702),
                "swiglu_limit": read.number("swiglu_limit", 7.0),
            }
            | cls.read_experts(read)
        )


class GptOssAttention(LlamaAttention):
    """Llama's attention with a sink per query head."""

    def __init__(self, config: GptOssConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        heads = config.num_attention_heads
        self.sinks = parameter(
            normal(rngs.params(), (heads,), dtype, config.initializer_range), (even(heads),)
        )

    def attend(self, q: Array, k: Array, v: Array, context: ForwardContext) -> Float[Array, "*t h d"]:
        """Returns the attention of every token."""
        sinks = self.sinks[...].astype(jnp.float32)
        return context.attend(self.layer, q, k, v, scale=self.scale, sinks=sinks)


class GptOssExperts(Experts):
    """Experts with biases and a clamped SwiGLU. The columns of gate and up alternate in one matrix."""

    kernel_names: ClassVar[tuple[str, ...]] = ("gate_up_proj", "down_proj")
    config: GptOssConfig

    def make_weights(self, make: Callable[..., nnx.Param]) -> None:
        """Creates the weights of the experts."""
        size, inner = self.config.hidden_size, self.config.moe_intermediate_size
        self.gate_up_proj = make((size, 2 * inner), (None, even(inner, 2)))
        self.gate_up_proj_bias = make((2 * inner,), (even(inner, 2),), std=0.0)
        self.down_proj = make((inner, size), (even(inner), None))
        # This bias is replicated on all devices, because it is added once, after the sum over devices.
        zeros = jnp.zeros((self.config.num_experts, size), self.down_proj.dtype)
        self.down_proj_bias = parameter(zeros, (None, None))

    def divided_weights(self) -> tuple[nnx.Param | QuantizedWeight, ...]:
        """Returns the weights that are divided among devices."""
        return self.gate_up_proj, self.gate_up_proj_bias, self.down_proj

    def apply_experts(
        self,
        rows: Float[Array, "n e"],
        experts: Int[Array, " n"],
        weights: tuple[Any, ...],
        multiply: Multiply,
    ) -> Float[Array, "n e"]:
        """Returns the outputs of the experts, without the last bias, for rows that are sorted by expert."""
        gate_up_proj, bias, down_proj = weights
        limit = self.config.swiglu_limit
        gate_up = (multiply(rows, gate_up_proj) + bias[experts]).astype(jnp.float32)
        gate, up = jnp.minimum(gate_up[:, ::2], limit), jnp.clip(gate_up[:, 1::2], -limit, limit)
        inner = (up + 1) * gate * jax.nn.sigmoid(self.config.swiglu_alpha * gate)
        return multiply(inner.astype(rows.dtype), down_proj)

    def weighted_sum(self, x: RoutedTokens, context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the weighted sum of the experts' outputs, with their last biases."""
        biases = self.down_proj_bias[...][x.expert_ids] * x.weights[..., None]
        return super().weighted_sum(x, context) + jnp.sum(biases, axis=-2)


class GptOssMLP(MoeMLP):
    """A router with a bias, and GptOssExperts."""

    router_bias: ClassVar[bool] = True
    experts_class: ClassVar[type[Experts]] = GptOssExperts


class GptOssDecoderLayer(MoeDecoderLayer):
    """Llama's layer with GptOssAttention and GptOssMLP."""

    attention_class: ClassVar[Callable[..., Module]] = GptOssAttention

    moe_class: ClassVar[Callable[..., Module]] = GptOssMLP


class GptOssForCausalLM(LlamaForCausalLM):
    """A Llama with attention sinks and a mixture of experts."""

    config_class: ClassVar[type[LlamaConfig]] = GptOssConfig
    layer_class: ClassVar[Callable[..., Module]] = GptOssDecoderLayer
    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE.with_names(
        (r"(layers\.\d+\.mlp)\.gate", r"model.\1.router"), transposed=r".*\.kernel"
    )
