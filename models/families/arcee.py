"""ArceeForCausalLM (Arcee's AFM): a Llama with an MLP without a gate, and the squared ReLU as activation.

Source: So et al., Primer, 2021, for the activation; semantics as in Hugging Face's ArceeForCausalLM.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jax_paged.models.families.blocks import UngatedDecoderLayer
from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.forward_context import Module


@dataclasses.dataclass(frozen=True)
class ArceeConfig(LlamaConfig):
    """Configuration of an AFM."""

    defaults: ClassVar[dict[str, Any]] = {"hidden_act": "relu2", "rms_norm_eps": 1e-5}


class ArceeForCausalLM(LlamaForCausalLM):
    """A Llama with MLPs without a gate."""

    config_class: ClassVar[type[LlamaConfig]] = ArceeConfig
    layer_class: ClassVar[Callable[..., Module]] = UngatedDecoderLayer
