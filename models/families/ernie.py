"""ERNIE 4.5, the dense ones: a Llama whose pairs of rotated dimensions are neighbours.

Source: Baidu, ERNIE 4.5 Technical Report, 2025; semantics as in Hugging Face's Ernie4_5ForCausalLM.
"""

import dataclasses
from typing import Any, ClassVar

from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.hf_format import ConfigReader


@dataclasses.dataclass(frozen=True)
class Ernie4_5Config(LlamaConfig):
    """Shape of a dense ERNIE 4.5."""

    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    is_interleaved: ClassVar[bool] = True

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        has_bias = read.choice("use_bias", False, (False, True))
        biases = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), has_bias)
        return super().read(read) | biases


class Ernie4_5ForCausalLM(LlamaForCausalLM):
    """A Llama with the config above."""

    config_class: ClassVar[type[LlamaConfig]] = Ernie4_5Config
