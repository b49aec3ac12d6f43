"""Ernie4_5ForCausalLM (the dense models of ERNIE 4.5): a Llama with interleaved rotary embedding.

Interleaved means that the rotation pairs adjacent dimensions. All linear layers of a decoder layer have
biases if `use_bias` is set.

Source: Baidu, ERNIE 4.5 Technical Report, 2025; semantics as in Hugging Face's Ernie4_5ForCausalLM.
"""

import dataclasses
from typing import Any, ClassVar

from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.hf_format import ConfigReader


@dataclasses.dataclass(frozen=True)
class Ernie4_5Config(LlamaConfig):
    """Configuration of a dense ERNIE 4.5."""

    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    is_interleaved: ClassVar[bool] = True

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        has_bias = read.choice("use_bias", False, (False, True))
        biases = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), has_bias)
        return super().read(read) | biases


class Ernie4_5ForCausalLM(LlamaForCausalLM):
    """A Llama with interleaved rotary embedding."""

    config_class: ClassVar[type[LlamaConfig]] = Ernie4_5Config
