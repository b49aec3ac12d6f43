"""MistralForCausalLM (Mistral): a Llama with a sliding window in all layers, if config.json sets one.

Source: Jiang et al., Mistral 7B, 2023.
"""

import dataclasses
from typing import Any, ClassVar

from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.hf_format import ConfigReader


@dataclasses.dataclass(frozen=True)
class MistralConfig(LlamaConfig):
    """Configuration of a Mistral."""

    defaults: ClassVar[dict[str, Any]] = {"num_key_value_heads": 8, "sliding_window": 4096}
    fixed: ClassVar[dict[str, Any]] = {"attention_bias": False, "output_bias": False, "mlp_bias": False}

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass, with the same sliding window for all layers."""
        fields = super().read(read)
        return fields | {"windows": cls.one_window(read, fields["num_hidden_layers"])}


class MistralForCausalLM(LlamaForCausalLM):
    """A Llama with sliding windows."""

    config_class: ClassVar[type[LlamaConfig]] = MistralConfig
