"""Exaone4ForCausalLM (EXAONE 4).

Differences from Llama: norms after attention and MLP instead of before; RMSNorm of queries and keys, per
head; in models with sliding windows, the layers with full attention have no rotary embedding.

Source: LG AI Research, EXAONE 4.0, 2025; semantics as in Hugging Face's Exaone4ForCausalLM.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jax_paged.models.families.blocks import PostNormDecoderLayer
from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.forward_context import Module
from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.rope import Rope


@dataclasses.dataclass(frozen=True)
class Exaone4Config(LlamaConfig):
    """Configuration of an EXAONE 4."""

    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        num_layers = fields["num_hidden_layers"]
        if read.get("sliding_window", None) is None:
            read.windows(num_layers, ["full_attention"] * num_layers, None)
            windows = ()
        elif read.get("layer_types", None) is None:
            windows = cls.patterned_windows(read, num_layers)
        else:
            # sliding_window_pattern is not read, because it may be a string such as "LLLG".
            windows = read.windows(num_layers, [], read.integer("sliding_window"))
        no_bias = {"attention_bias": False, "output_bias": False, "mlp_bias": False}
        return fields | no_bias | {"qk_norm": True, "windows": windows}

    def rope_of(self, layer: int) -> Rope:
        """Returns the rotary embedding of a layer; none for full attention in a model with windows."""
        return Rope(()) if self.windows and self.windows[layer] is None else self.rope


class Exaone4ForCausalLM(LlamaForCausalLM):
    """A Llama with post-norm layers."""

    config_class: ClassVar[type[LlamaConfig]] = Exaone4Config
    layer_class: ClassVar[Callable[..., Module]] = PostNormDecoderLayer
