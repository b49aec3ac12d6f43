"""CohereForCausalLM (Command R) and Cohere2ForCausalLM (Command R7B and Command A).

Differences from Llama: attention and MLP are parallel, with one norm for both; LayerNorm without biases, for
queries and keys too in some models; interleaved rotary embedding (pairs of adjacent dimensions); logits are
multiplied by `logit_scale`. Cohere 2 has sliding windows in most layers, and no rotary embedding in the
layers with full attention.

Source: names and semantics of the weights as in Hugging Face's CohereForCausalLM and Cohere2ForCausalLM.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jaxtyping import Array, Float

from jax_paged.models.families.blocks import HeadsLayerNormAttention, ParallelDecoderLayer, UnbiasedLayerNorm
from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.forward_context import Module
from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class CohereConfig(LlamaConfig):
    """Configuration of a Command R.

    Args:
        logit_scale: Factor of the logits.
    """

    logit_scale: float

    defaults: ClassVar[dict[str, Any]] = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True}
    epsilon_name: ClassVar[str] = "layer_norm_eps"
    is_interleaved: ClassVar[bool] = True
    qk_norm_choices: ClassVar[tuple[bool, ...]] = (False, True)  # supported values of use_qk_norm

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        return super().read(read) | {
            "mlp_bias": False,
            "logit_scale": read.number("logit_scale", 0.0625),
            "qk_norm": read.choice("use_qk_norm", False, cls.qk_norm_choices),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohere2Config(CohereConfig):
    """Configuration of a Command R7B or Command A."""

    defaults: ClassVar[dict[str, Any]] = CohereConfig.defaults | {
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }
    qk_norm_choices: ClassVar[tuple[bool, ...]] = (False,)

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        return fields | {"windows": cls.patterned_windows(read, fields["num_hidden_layers"])}

    def rope_of(self, layer: int) -> Rope:
        """Returns the rotary embedding of a layer; none for layers with full attention."""
        return Rope(()) if self.windows[layer] is None else self.rope


class CohereDecoderLayer(ParallelDecoderLayer):
    """Parallel layer with LayerNorm."""

    attention_class: ClassVar[Callable[..., Module]] = HeadsLayerNormAttention
    norm_class: ClassVar[Callable[..., Module]] = UnbiasedLayerNorm


class CohereForCausalLM(LlamaForCausalLM):
    """A Llama with parallel layers and scaled logits."""

    config: CohereConfig
    config_class: ClassVar[type[LlamaConfig]] = CohereConfig
    layer_class: ClassVar[Callable[..., Module]] = CohereDecoderLayer
    norm_class: ClassVar[Callable[..., Any]] = UnbiasedLayerNorm

    def logits(self, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the scaled float32 logits."""
        return super().logits(hidden) * self.config.logit_scale


class Cohere2ForCausalLM(CohereForCausalLM):
    """A Command R with sliding windows, and layers without rotary embedding."""

    config_class: ClassVar[type[LlamaConfig]] = Cohere2Config
