"""Which model families there are. A new one is a file beside this one, and a line below."""

from typing import Any

from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.gemma import Gemma2ForCausalLM, Gemma3ForCausalLM
from jax_paged.models.gpt2 import GPT2LMHeadModel
from jax_paged.models.llama import LlamaForCausalLM
from jax_paged.models.mistral import MistralForCausalLM
from jax_paged.models.mixtral import MixtralForCausalLM
from jax_paged.models.opt import OPTForCausalLM
from jax_paged.models.phi3 import Phi3ForCausalLM
from jax_paged.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from jax_paged.models.t5 import T5ForConditionalGeneration

# By the name that stands under "architectures" in config.json.
MODELS: dict[str, type[LanguageModel]] = {
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "GPT2LMHeadModel": GPT2LMHeadModel,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "OPTForCausalLM": OPTForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "T5ForConditionalGeneration": T5ForConditionalGeneration,
}


def get_model_class(hf_config: dict[str, Any]) -> tuple[str, type[LanguageModel]]:
    """Returns the first supported architecture that a config.json names, and its class.

    Raises:
        ValueError: If it names none; the message lists the supported ones.
    """
    architectures = hf_config.get("architectures")
    for name in architectures if isinstance(architectures, list) else []:
        if name in MODELS:
            return name, MODELS[name]
    raise ValueError(
        f"architectures of config.json is {architectures!r}; allowed: a list with one of {', '.join(MODELS)}"
    )
