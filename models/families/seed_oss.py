"""SeedOssForCausalLM (Seed-OSS): a Llama with biases in the projections to queries, keys and values.

Source: ByteDance Seed, Seed-OSS, 2025; semantics as in Hugging Face's SeedOssForCausalLM.
"""

import dataclasses
from typing import Any, ClassVar

from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.hf_format import ConfigReader


@dataclasses.dataclass(frozen=True)
class SeedOssConfig(LlamaConfig):
    """Configuration of a Seed-OSS."""

    defaults: ClassVar[dict[str, Any]] = {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        return super().read(read) | {"output_bias": read.choice("attention_out_bias", False, (False, True))}


class SeedOssForCausalLM(LlamaForCausalLM):
    """A Llama with biases in the projections to queries, keys and values."""

    config_class: ClassVar[type[LlamaConfig]] = SeedOssConfig
