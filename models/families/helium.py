"""HeliumForCausalLM (Helium): a Llama with interleaved rotary embedding (pairs of adjacent dimensions).

Source: Kyutai, Helium 1, 2025; semantics as in Hugging Face's HeliumForCausalLM.
"""

import dataclasses
from typing import Any, ClassVar

from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM


@dataclasses.dataclass(frozen=True)
class HeliumConfig(LlamaConfig):
    """Configuration of a Helium."""

    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
    }
    is_interleaved: ClassVar[bool] = True
    fixed: ClassVar[dict[str, Any]] = {"output_bias": False}


class HeliumForCausalLM(LlamaForCausalLM):
    """A Llama with interleaved rotary embedding."""

    config_class: ClassVar[type[LlamaConfig]] = HeliumConfig
